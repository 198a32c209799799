"""One replica of a model: a worker on the wire, with its own frontend, supervised engine, and health."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects
from tokenbus.worker.adapters.adapters import AdapterFolder
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.contract import MemoryPlan, RecoveredCopies
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory import claims
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.sim import runner
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineLink, EngineProcess
from tokenbus.worker.engine_client.listener import EngineListener, Observation
from tokenbus.worker.engine_client.supervisor import EngineSupervisor
from tokenbus.worker.replica.endpoints import OnLoad, OwnModel
from tokenbus.worker.replica.frontend import Frontend
from tokenbus.worker.replica.health import HealthMonitor
from tokenbus.worker.settings.adapter_settings import split_tenants
from tokenbus.worker.settings.settings import ModelToServe, WorkerSettings
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

_LOADING_LOG_INTERVAL_S = 2.0
MAX_FAILURES = 10
"""After this many failed requests in a row, a replica does not count as ready until one succeeds."""


def successor_settings(settings: EngineSettings, config: contract.EngineConfig) -> EngineSettings:
    """Returns the settings for the engine that replaces one with this configuration.

    It loads the same files, and has the sizes that the first engine chose, so that even streams as long as the context
    can continue there. Free memory, or a budget in bytes, is not considered a second time; pool memory that can't be
    lent is reserved again."""
    settings = msgspec.structs.replace(settings, files=config.files)
    if config.memory is not None:
        settings = msgspec.structs.replace(
            settings,
            gpu_layers=config.memory.gpu_layers if config.engine == "gguf" else settings.gpu_layers,
            host_cache_limit_bytes=0 if settings.keep_cache else max(1, config.memory.host_cache_bytes),
            memory_share=0.0,
        )
    if not config.kv_tokens:
        return settings
    return msgspec.structs.replace(
        settings,
        context_length=config.context_length,
        kv_tokens=config.kv_tokens,
        kv_block_size=config.kv_block_size,
        max_num_seqs=config.max_num_seqs,
        kv_limit_bytes=0,
        kv_reserved_bytes=config.kv_bytes if settings.kv_pool_bytes and not config.kv_lane_bytes else 0,
    )


def cautious_settings(settings: EngineSettings, deaths: int) -> EngineSettings:
    """Returns the settings for an engine after `deaths` others died while loading, perhaps because they ran out of
    memory: each death halves the memory that it plans with."""
    return msgspec.structs.replace(settings, memory_share=settings.memory_share / 2**deaths)


class Replica(EngineListener):
    """Serves from `run` until drained. Its engine is a step loop in `process`."""

    def __init__(
        self,
        settings: WorkerSettings,
        line: Lifeline,
        model: ModelToServe,
        worker_id: str,
        engine: EngineSettings,
        process: EngineProcess,
        metrics: WorkerMetrics,
        tracer: tracing.Tracer,
        on_load: OnLoad,
        own_model: OwnModel | None = None,
    ) -> None:
        """`on_load` loads more models alongside this one. `own_model` loads and unloads this one, if it is loaded on
        demand: then an engine that can't be restarted ends, and is not retried indefinitely."""
        self.worker_id = worker_id
        self.served_name = model.served_name
        self.load_progress = 0.0
        """The fraction of its model that is loaded, from 0 to 1."""
        self.started: asyncio.Future[contract.EngineConfig] = asyncio.get_running_loop().create_future()
        """Done once the replica first serves. It never fails: `run` raises instead."""
        self._settings = settings
        self._model = model
        self._engine = engine
        self._process = process
        self._is_patient = own_model is None
        self._memory_fd = claims.open_memory()
        """An in-memory file for copies of blocks, which each engine hands on to the next one."""
        self._metrics = ReplicaMetrics(metrics, model.served_name, worker_id)
        self._health = HealthMonitor()
        self._config: contract.EngineConfig | None = None
        """The configuration of the last engine since the model was loaded."""
        self._logged_at = time.monotonic()
        self._log = structlog.get_logger()
        names = subjects.Subjects(settings.prefix)
        self._line = line
        self.frontend = Frontend(
            line, names, self.served_name, worker_id, settings.frontend, self._metrics, tracer, on_load, own_model
        )
        runner.lose_events(self.frontend.bus, names.events(self.served_name, worker_id), engine)
        self.frontend.on_tick = self._tick
        self.frontend.adapters.want(model.adapters)
        self._supervisor = self._make_supervisor()

    def __repr__(self) -> str:
        return f"<Replica {self.worker_id} of {self.served_name}>"

    def apply_settings(self, settings: WorkerSettings) -> None:
        """Applies the settings that may change while the replica serves."""
        self._settings = settings
        self.frontend.streams.settings = settings.frontend
        self._supervisor.engine.capacity.max_waiting = settings.max_waiting

    async def run(self) -> None:
        """Serves until `frontend.drain` is requested. Raises ModelError if the model can't be served, and ReplacedError
        if another worker takes the name."""
        structlog.contextvars.bind_contextvars(worker_id=self.worker_id)
        async with contextlib.AsyncExitStack() as opened:
            opened.callback(os.close, self._memory_fd)
            opened.callback(self._metrics.forget)
            # asked to leave before its card was published
            if self.frontend.drain.requested.is_set():
                return
            opened.push_async_callback(self.frontend.close)
            connect = partial(nats.connect, self._settings.broker, f"worker {self.worker_id} kv")
            await self.frontend.open(connect)
            await self._serve()

    @property
    def unready_reason(self) -> str:
        """The reason why the replica should not be given requests, or empty."""
        failures = self._metrics.failures_in_a_row
        if failures >= MAX_FAILURES:
            return f"{self.worker_id}: the last {failures} requests have failed"
        return "" if self.frontend.is_ready else f"{self.worker_id} is not ready"

    def describe(self) -> dict[str, Any]:
        """Returns its state, load and health as JSON values."""
        return {
            "worker_id": self.worker_id,
            "model": self.served_name,
            "state": str(self.frontend.announcer.state),
            "reason": self.unready_reason,
            "load": msgspec.to_builtins(self._supervisor.engine.load() if self._config is not None else None),
            "health": msgspec.to_builtins(self._health.latest),
        }

    def update_gauges(self) -> None:
        """Updates the replica's gauges for a scrape."""
        frontend, engine = self.frontend, self._supervisor.engine
        self._metrics.add_up()
        self._metrics.loading.set(frontend.announcer.state in (ReplicaState.STARTING, ReplicaState.RESTARTING))
        if self._config is not None:
            self._metrics.update_gauges(engine.load(), self._config)
            self._metrics.ready.set(not self.unready_reason)
            self._metrics.unguarded.set(sum(not stream.guardian for stream in frontend.streams))
            self._metrics.held.set(sum(stream.hold is not None for stream in frontend.streams))
            self._metrics.adapters.set(len(frontend.adapters))
            self._metrics.kv_leases.set(frontend.exchange.num_leases)
        self._metrics.update_health(self._health.latest)

    def loading(self, fraction: float) -> None:
        """Logs the progress of a long load every few seconds."""
        self.load_progress = fraction
        now = time.monotonic()
        if now - self._logged_at >= _LOADING_LOG_INTERVAL_S:
            self._logged_at = now
            self._log.info("model_loading", percent=round(100 * fraction))

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """Serves with a new engine. Later engines will load the same files and have the same sizes."""
        if self._config is not None:
            self._metrics.restarts.inc()
        else:
            self._log_start(config)
        self._config = config
        self._health.engine_started(self._supervisor.engine, config)
        self._engine = successor_settings(self._engine, config)
        self.frontend.engine_started(engine, config)
        if not self.started.done():
            self.started.set_result(config)

    def _log_start(self, config: contract.EngineConfig) -> None:
        if config.slow_weights:
            self._log.info("weights_slow", reason=config.slow_weights)
        if config.memory is not None:
            self._log_memory(config, config.memory)

    def _log_memory(self, config: contract.EngineConfig, plan: MemoryPlan) -> None:
        """Logs the totals from which sizes were chosen, in MiB."""
        self._log.info(
            "memory_planned",
            context_length=config.context_length,
            kv_tokens=config.kv_tokens,
            weights_mib=plan.weight_bytes >> 20,
            kv_mib=plan.kv_bytes >> 20,
            buffers_mib=plan.compute_bytes >> 20,
            host_cache_mib=plan.host_cache_bytes >> 20,
            planned_mib=plan.planned_bytes >> 20,
            reserve_mib=plan.reserve_bytes >> 20,
            free_mib=plan.free_bytes >> 20,
            total_mib=plan.total_bytes >> 20,
            gpu_mib=plan.gpu_bytes >> 20,
            gpu_layers=plan.gpu_layers,
        )

    def engine_died(self) -> None:
        """Announces that there is no engine for now."""
        self._health.engine_died()
        self.frontend.engine_died()

    def observe(self, seen: Observation) -> None:
        self._metrics.observe(seen)
        match seen:
            case ipc.KvPoolStats(reclaimed_idle=idle, reclaimed_used=preempted) if idle or preempted:
                self._log.info("kv_reclaimed", held_bytes=seen.held, idle_bytes=idle, preempted_bytes=preempted)
            case RecoveredCopies(blocks, num_bytes, discarded) if blocks or discarded:
                self._log.info("host_cache_recovered", blocks=blocks, bytes=num_bytes, discarded=dict(discarded))

    def constraint_given_up(self) -> None:
        self._metrics.constraint_refusals.labels("given_up").inc()

    def prompt_progress(self, key: str, computed_tokens: int, cached_tokens: int) -> None:
        self.frontend.streams.prompt_progress(key, computed_tokens, cached_tokens)

    def token_interval(self, seconds: float, count: int) -> None:
        self._metrics.token_interval(seconds, count)

    def step_done(self) -> None:
        self.frontend.step_done()

    def _make_supervisor(self) -> EngineSupervisor:
        prepare, timeout_s = self.frontend.adapters.load_all, self._settings.step_timeout_s
        engine = EngineClient(self._launch, self._settings.max_waiting, self)
        return EngineSupervisor(engine, self.worker_id, timeout_s, prepare, is_patient=self._is_patient)

    async def _run_engines(self) -> None:
        """Runs engines, one after another. Raises ModelError."""
        await self._supervisor.run()

    async def _launch(self) -> EngineLink:
        settings, has_served = self._engine, self._config is not None
        if not has_served:
            settings = cautious_settings(settings, self._supervisor.restarts)
        return await self._process.open(settings, self._memory_fd, has_served=has_served)

    def _tick(self, now: float, gap_s: float) -> None:
        self._supervisor.tick(now, gap_s)
        engine, announcer = self._supervisor.engine, self.frontend.announcer
        if self._health.tick(now, engine):
            announcer.health = announcer.log.health = self._health.latest
        self._metrics.add_up()
        if self._config is not None:
            self._metrics.count_load(engine.load())

    async def _serve(self) -> None:
        frontend = self.frontend
        lives = [self._run_engines(), frontend.wait_replaced()]
        if self._model.adapter_folder:
            path, tenants = split_tenants(self._model.adapter_folder)
            lives.append(AdapterFolder(Path(path), tenants, frontend.adapters).run())
        running: list[asyncio.Task[None]] = [tasks.awaited(life) for life in lives]
        left = tasks.awaited(frontend.drain.requested.wait())
        try:
            await asyncio.wait([left, *running], return_when=asyncio.FIRST_COMPLETED)
            # if one has failed, its error is why the replica ends
            for task in running:
                if task.done():
                    task.result()
            await leave(frontend, self._supervisor.cleanup, self._settings.grace_s, self._settings.handover_s)
        finally:
            left.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(left, *running, return_exceptions=True)
            frontend.announce_stopped()


async def leave(
    frontend: Frontend, end_engine: Callable[[], Awaitable[None]], grace_s: float, handover_s: float
) -> None:
    """Accepts nothing new, lets running requests finish within the grace period, asks routers to take the rest, and
    ends what no router has taken: with what was generated if it can't be continued, else with an error. A drain may
    name other times than these."""
    log, drain = structlog.get_logger(), frontend.drain
    frontend.announcer.change(ReplicaEvent.DRAIN)
    log.info("draining", grace_s=grace_s)
    if frontend.announcer.serving is not None:
        await drain.finish(frontend.announcer.serving.engine.drain(), grace_s)
    if len(frontend.streams) and drain.handover_s(handover_s):
        frontend.announcer.change(ReplicaEvent.LEAVE)
        log.info("leaving", handover_s=drain.handover_s(handover_s))
        await drain.hand_over(frontend.wait_left(), handover_s)
    frontend.streams.stop_begun(unguarded_only=drain.handover_s(handover_s) > 0)
    await end_engine()
    log.info("drained")
