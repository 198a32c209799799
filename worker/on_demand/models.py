"""The on-demand models of one worker process: carries out what the load plan decides.

Each has a replica whose engine comes and goes: the frontend stays on the bus, and announces that its model is loadable.
"""

import asyncio
import os
import time
from functools import partial
from typing import Protocol

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors, internal
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import MemoryNeed, mib
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.engine_client.supervisor import EngineSupervisor
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.model_files import is_hub_name, source_name
from tokenbus.worker.models import registry
from tokenbus.worker.on_demand import model_sizes
from tokenbus.worker.on_demand.load_plan import LoadPlan, LoadState, LoadStep, Unload
from tokenbus.worker.on_demand.measuring import Measuring
from tokenbus.worker.replica.endpoints import OnLoad, OwnModel
from tokenbus.worker.replica.replica import Replica
from tokenbus.worker.settings.settings import ModelToServe, WorkerSettings
from tokenbus.worker.telemetry.metrics import WorkerMetrics

_POLL_S = 0.05


class LoadListener(Protocol):
    """Learns the state of a replica's model."""

    def want(self, name: str) -> internal.ControlReply:
        """A router or an operator asks for the model; returns how far it is."""
        ...

    def release(self, name: str) -> internal.ControlReply:
        """An operator asks for the model's memory; returns whether it will be unloaded."""
        ...

    def model_loaded(self, name: str) -> None:
        """The model serves, after `load` or after its engine was restarted."""
        ...

    def model_failed(self, name: str, error: ModelError) -> None:
        """The model could not be loaded, or its engine died and it can't be reloaded."""
        ...

    def model_unloaded(self, name: str) -> None:
        """The model no longer takes any memory."""
        ...


class OnDemandReplica(Replica):
    """Serves a model from each `load` to the next `unload`. Its engine has its own process, so that all of its memory
    is given back, and loading disturbs no other model."""

    def __init__(
        self,
        settings: WorkerSettings,
        line: Lifeline,
        model: ModelToServe,
        worker_id: str,
        metrics: WorkerMetrics,
        tracer: tracing.Tracer,
        on_load: OnLoad,
        listener: LoadListener,
    ) -> None:
        process, name = EngineProcess(settings.log.variables()), model.served_name
        own = OwnModel(partial(listener.want, name), partial(listener.release, name))
        super().__init__(settings, line, model, worker_id, model.engine, process, metrics, tracer, on_load, own)
        self._listener = listener
        self._listing = _listing(model.engine, 1)
        self._load_requested = asyncio.Event()

    def set_context_length(self, tokens: int) -> None:
        """Announces the expected context length, until the model is first loaded."""
        self._listing = _listing(self._engine, tokens)
        if self.frontend.announcer.state is ReplicaState.UNLOADED:
            self.frontend.announcer.listing = self._listing
            self.frontend.announcer.publish_card()

    def load(self, need: MemoryNeed) -> None:
        """Starts an engine that takes no more than `need`. The listener is told whether it serves."""
        self.load_progress = 0.0
        self._engine = model_sizes.with_sizes(self._model.engine, need)
        self.frontend.announcer.change(ReplicaEvent.LOAD)
        self._load_requested.set()

    async def unload(self) -> None:
        """Accepts no new requests, waits until the running ones have ended, and ends the engine. If anything fails, the
        engine ends at once, since its memory then counts as free."""
        supervisor = self._supervisor
        try:
            self.frontend.announcer.change(ReplicaEvent.UNLOAD)
            await self._wait_idle(supervisor)
        finally:
            if supervisor is self._supervisor:
                await supervisor.cleanup()

    def kill_engine(self) -> None:
        """Kills an engine that should end and does not. No other is started."""
        self._process.kill()

    async def _wait_idle(self, supervisor: EngineSupervisor) -> None:
        """Returns when no stream is open, or when there is no engine."""
        while supervisor is self._supervisor:
            await supervisor.engine.drain()
            if not len(self.frontend.streams):
                return
            await asyncio.sleep(_POLL_S)  # no engine can continue the rest: routers take them, or they end

    @property
    def idle_since(self) -> float | None:
        """When the engine's last request ended; None while it has one, or without an engine."""
        return None if len(self.frontend.streams) else self._supervisor.engine.idle_since

    @property
    def unready_reason(self) -> str:
        """A model that is not loaded still takes requests: routers hold them."""
        return "" if self.started.done() else f"{self.worker_id} is not ready"

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        super().engine_started(engine, config)
        self._listener.model_loaded(self.served_name)

    async def _run_engines(self) -> None:
        self.frontend.announcer.listing = self._listing
        self.frontend.announcer.change(ReplicaEvent.UNLOADED)
        self.started.set_result(self._listing)
        while True:
            await self._load_requested.wait()
            failure: ModelError | None = None
            try:
                await self._supervisor.run()
            except ModelError as error:
                await self._supervisor.cleanup()
                failure = error
            if self.frontend.drain.requested.is_set():
                return
            self._forget_engine()
            if failure is not None:
                self._listener.model_failed(self.served_name, failure)
            else:
                self._listener.model_unloaded(self.served_name)

    def _forget_engine(self) -> None:
        """Prepares for the next load: the loaded file may have been replaced."""
        self._engine, self._config = self._model.engine, None
        self._metrics.engine_unloaded()
        os.ftruncate(self._memory_fd, 0)
        self._load_requested.clear()
        self._supervisor = self._make_supervisor()
        self.frontend.announcer.change(ReplicaEvent.UNLOADED)


def _listing(settings: EngineSettings, context_length: int) -> contract.EngineConfig:
    """Returns a stand-in for the configuration of an engine that was never started."""
    return contract.EngineConfig(
        engine=registry.engine_of(settings.model, settings.engine),
        engine_version="",
        source=source_name(settings.model),
        fingerprint=settings.fingerprint,
        context_length=context_length,
        max_num_seqs=1,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_block_size=1,
        total_kv_blocks=0,
        prefix_cache=False,
        vocab_size=0,
        features=(),
        defaults=SamplingParams(),
        versions={},
        pid=0,
    )


_TICK_S = 0.1
_CHECK_TIMEOUT_S = 2.0
"""The time within which the models' files must be read, for a start to be refused since none fits into the budget."""


class OnDemandModels:
    """Loads models that routers request, and unloads others to make room. Replicas report the outcomes."""

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics, worker_id: str) -> None:
        self._settings = settings
        self._models = {model.served_name: model for model in settings.models if model.on_demand}
        self._metrics = metrics
        self._worker_id = worker_id
        self._plan = LoadPlan((), 0)
        self._beside: dict[str, MemoryNeed] = {}
        """The memory of models loaded alongside these."""
        self._replicas: dict[str, OnDemandReplica] = {}
        self._measuring: dict[str, asyncio.Task[None]] = {}
        self._threads = Measuring()
        self._changing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._began_at: dict[str, float] = {}
        """When the current load of each model began."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<OnDemandModels {self._plan!r}>"

    async def prepare(self) -> None:
        """Sets the models' budget: what the other models leave of the whole one.

        Raises ModelError if they alone take more, and if none of the models fits into it."""
        others = [model for model in self._settings.models if not model.on_demand]
        budget = self._settings.memory_budget_bytes
        for model in others if self._models or budget else ():
            need = self._beside[model.served_name] = await self._need_to_start(model)
            budget -= need.total_bytes * model.replicas if budget else 0
            if budget <= 0 < self._settings.memory_budget_bytes:
                whole = mib(self._settings.memory_budget_bytes)
                raise ModelError(
                    f"the pinned models take more than the budget: {model.served_name} needs {need}, and all together "
                    f"may take {whole}; raise --memory-budget-mib"
                )
        self._plan = LoadPlan(self._models, budget, self._settings.idle_unload_s)
        if self._models and budget:
            await self._check_budget(budget)

    async def _check_budget(self, budget_bytes: int) -> None:
        """Raises ModelError if no model fits into a budget. What is not on this machine yet, or can't be measured soon,
        is not waited for: whoever requests it is told."""
        needs = []
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                for model in self._models.values():
                    if is_hub_name(model.engine.model):
                        return
                    needs.append((await self._measure_files(model), model.served_name))
                    if needs[-1][0].total_bytes <= budget_bytes:
                        return
        except Exception:  # each model is measured again, and then what is wrong with it is said
            return
        need, name = min(needs, key=lambda one: one[0].total_bytes)
        raise ModelError(
            f"no model fits into the {mib(budget_bytes)} that are left for them: {name} needs {need} for contexts of "
            f"{need.context_length:,} tokens; raise --memory-budget-mib, or lower --kv-tokens or --context-length"
        )

    async def take(self, model: ModelToServe) -> int:
        """Takes the memory of a replica loaded alongside these models out of their budget; returns its bytes.

        Raises ModelError if too little is left."""
        if not self._plan.budget_bytes:
            return 0
        need = self._beside[model.served_name] = await self._need_to_start(model)
        if not self._plan.take(need.total_bytes):
            left = mib(self._plan.budget_bytes - self._plan.reserved_bytes)
            raise ModelError(
                f"{model.served_name} needs {need}, and {left} are left of the budget: unload another model, or raise "
                "--memory-budget-mib"
            )
        return need.total_bytes

    def sized(self, model: ModelToServe) -> EngineSettings:
        """Returns the settings of a model loaded alongside these, with the sizes that `take` counted."""
        need = self._beside.get(model.served_name)
        return model.engine if need is None else model_sizes.with_sizes(model.engine, need)

    def give_back(self, num_bytes: int) -> None:
        """Gives back what `take` has taken."""
        self._plan.give_back(num_bytes)
        self._changed.set()

    def add(self, replica: OnDemandReplica) -> None:
        """Adds a replica before it runs."""
        name = replica.served_name
        self._replicas[name] = replica
        self._changed.set()  # from now on there is something to watch
        self._start_measuring(name)

    def remove(self, replica: OnDemandReplica) -> None:
        """Forgets a replica that has ended."""
        if self._replicas.pop(replica.served_name, None) is not None:
            self._plan.remove(replica.served_name)

    def update_gauges(self) -> None:
        """Updates the gauges for a scrape."""
        for name, replica in self._replicas.items():
            need, is_reserved = self._plan.need_of(name), self._plan.state_of(name) is not LoadState.UNLOADED
            reserved = need.total_bytes if need is not None and is_reserved else 0
            self._metrics.memory_budget.labels(name, replica.worker_id).set(self._plan.budget_bytes)
            self._metrics.memory_reserved.labels(name, replica.worker_id).set(reserved)
            for state in LoadState:
                own = self._metrics.model_state.labels(name, replica.worker_id, state)
                own.set(self._plan.state_of(name) is state)

    async def run(self) -> None:
        """Loads and unloads until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_TICK_S if self._replicas else None):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                self._changed.clear()
                self._act(time.monotonic())
        finally:
            self._threads.stop()
            running = [*self._changing, *self._measuring.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def model_loaded(self, name: str) -> None:
        if self._plan.state_of(name) is not LoadState.LOADING:
            return  # its engine was restarted
        seconds = time.monotonic() - self._began_at[name]
        self._plan.loaded(name, time.monotonic())
        replica = self._replicas[name]
        self._metrics.model_loads.labels(name, replica.worker_id, "ok").inc()
        self._metrics.model_load_seconds.labels(name, replica.worker_id).observe(seconds)
        self._log.info("model_loaded", worker_id=replica.worker_id, model=name, total_ms=round(seconds * 1e3, 1))
        self._changed.set()

    def model_failed(self, name: str, error: ModelError) -> None:
        replica, reason = self._replicas[name], str(error)
        is_memory = isinstance(error, ModelTooLargeError)
        code = errors.Code.INSUFFICIENT_MEMORY if is_memory else errors.Code.NO_WORKER
        self._plan.failed(name, reason, time.monotonic(), code)
        self._metrics.model_loads.labels(name, replica.worker_id, "failed").inc()
        self._log.error("model_not_loaded", worker_id=replica.worker_id, model=name, error=reason)
        self._start_measuring(name)  # its file may have been replaced
        self._changed.set()

    def model_unloaded(self, name: str) -> None:
        self._plan.unloaded(name)
        self._log.info("model_unloaded", worker_id=self._replicas[name].worker_id, model=name)
        self._start_measuring(name)
        self._changed.set()

    def want(self, name: str) -> internal.ControlReply:
        """Requests that a model be loaded; returns the progress."""
        error = self._plan.want(name, time.monotonic())
        if error is not None:
            return internal.ControlReply(ok=False, error=error)
        if self._plan.need_of(name) is None:
            self._start_measuring(name)
        self._changed.set()
        replica, state = self._replicas[name], self._plan.state_of(name)
        progress = {LoadState.LOADING: min(replica.load_progress, 0.99), LoadState.LOADED: 1.0}.get(state, 0.0)
        return internal.ControlReply(ok=True, progress=round(progress, 3))

    def release(self, name: str) -> internal.ControlReply:
        """Unloads a model that is loaded, when its running requests have ended."""
        if self._plan.state_of(name) is LoadState.LOADING:
            early = errors.request_error(errors.Code.INVALID_REQUEST, f"{name} is being loaded: unload it after that")
            return internal.ControlReply(ok=False, error=early.error)
        self._plan.release(name)
        self._changed.set()
        return internal.ControlReply(ok=True)

    def worker_of(self, name: str) -> str:
        """Returns the id of the replica that loads a model on demand; empty if none does."""
        replica = self._replicas.get(name)
        return "" if replica is None else replica.worker_id

    def _act(self, now: float) -> None:
        for name, replica in self._replicas.items():
            self._plan.used(name, idle_since=replica.idle_since)
        while (action := self._plan.next_action(now, self._free_bytes())) is not None:
            match action:
                case LoadStep(name):
                    self._began_at[name] = now
                    need = self._plan.need_of(name)
                    assert need is not None, self._plan
                    self._replicas[name].load(need)
                case Unload(name, reason):
                    replica = self._replicas[name]
                    self._metrics.model_unloads.labels(name, replica.worker_id, reason).inc()
                    self._log.info("model_unloading", worker_id=replica.worker_id, model=name, reason=reason)
                    self._start_unloading(replica)

    def _free_bytes(self) -> int:
        """Returns the machine's free memory; 0 while it does not matter, since reading it takes a millisecond."""
        return device_memory.free_host_bytes() if self._plan.has_wanted else 0

    def _start_unloading(self, replica: OnDemandReplica) -> None:
        # the plan is told when its engine ends, however that happens
        task = tasks.background("unload", replica.unload(), lambda _: replica.kill_engine())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    def _start_measuring(self, name: str) -> None:
        if name not in self._measuring:
            measuring = tasks.background("measure a model", self._measure(name), partial(self._not_measured, name))
            self._measuring[name] = measuring
            measuring.add_done_callback(lambda _: self._measuring.pop(name, None))

    async def _measure(self, name: str) -> None:
        """Finds out how much memory a model needs, which may require a download."""
        try:
            need = await self._measure_files(self._models[name])
        except (ModelError, OSError) as error:
            self._not_measured(name, error)
            return
        if name in self._replicas:
            self._plan.set_need(name, need)
            self._replicas[name].set_context_length(need.context_length)
            self._changed.set()

    def _not_measured(self, name: str, error: Exception) -> None:
        """Refuses a model of which nothing is known. A model that was loaded before is retried: the load then reports
        why it fails."""
        if name in self._replicas and self._plan.need_of(name) is None:
            worker_id = self._replicas[name].worker_id
            self._plan.failed(name, str(error) or type(error).__name__, time.monotonic())
            self._log.error("model_not_loaded", worker_id=worker_id, model=name, error=str(error))

    async def _need_to_start(self, model: ModelToServe) -> MemoryNeed:
        """Raises ModelError for a model that can't be measured."""
        try:
            return await self._measure_files(model)
        except OSError as error:
            raise ModelError(str(error)) from error

    async def _measure_files(self, model: ModelToServe) -> MemoryNeed:
        """Raises ModelError and OSError."""
        facts = await self._threads.facts(model.engine)
        return model_sizes.choose_sizes(facts, model.engine, self._settings.memory_budget_bytes)
