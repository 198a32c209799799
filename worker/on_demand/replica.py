"""A replica whose engine comes and goes: the frontend stays on the bus, and announces that its model is loadable."""

import asyncio
import os
from functools import partial
from typing import Protocol

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.need import MemoryNeed
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.engine_client.supervisor import EngineSupervisor
from tokenbus.worker.files.model_files import source_name
from tokenbus.worker.models import registry
from tokenbus.worker.on_demand import model_sizes
from tokenbus.worker.replica.endpoints import OnLoad
from tokenbus.worker.replica.replica import Replica
from tokenbus.worker.settings.settings import ModelToServe, WorkerSettings
from tokenbus.worker.telemetry.metrics import WorkerMetrics

_POLL_S = 0.05


class LoadListener(Protocol):
    """Learns the state of a replica's model."""

    def want(self, name: str) -> internal.ControlReply:
        """A router asks for the model; returns how far it is."""
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
        model: ModelToServe,
        worker_id: str,
        metrics: WorkerMetrics,
        tracer: tracing.Tracer,
        on_load: OnLoad,
        listener: LoadListener,
    ) -> None:
        process, on_want = EngineProcess(settings.log.variables()), partial(listener.want, model.served_name)
        super().__init__(settings, model, worker_id, model.engine, process, metrics, tracer, on_load, on_want)
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
        """Returns when the engine has no request, or when there is no engine."""
        while supervisor.engine is not None and supervisor is self._supervisor:
            await supervisor.engine.drain()
            if self.idle_since is not None:
                return
            await asyncio.sleep(_POLL_S)  # its engine has died: the next one continues the streams

    @property
    def idle_since(self) -> float | None:
        """When the engine's last request ended; None while it has one, or without an engine."""
        engine = self._supervisor.engine
        return None if engine is None or len(self.frontend.streams) else engine.idle_since

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
        engine=registry.engine_of(settings.model) if settings.engine == "auto" else settings.engine,
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
