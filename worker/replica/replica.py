"""One replica of a model: a worker on the wire, with its own connections, frontend and supervised engine."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal, subjects
from tokenbus.worker.adapters.adapter_folder import AdapterFolder
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.contract.memory_plan import MemoryPlan
from tokenbus.worker.engine.host_cache.recovery import RecoveredCopies
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.sim import faults
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.supervisor import EngineSupervisor
from tokenbus.worker.replica import host_memory
from tokenbus.worker.replica.frontend import Frontend
from tokenbus.worker.replica.health import HealthMonitor
from tokenbus.worker.settings.adapter_settings import split_tenants
from tokenbus.worker.settings.settings import ModelToServe, OnProgress, WorkerSettings
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
            gpu_layers=config.memory.gpu_layers,
            host_cache_limit_bytes=max(1, config.memory.host_cache_bytes),
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

    _is_patient: ClassVar[bool] = True
    """Whether loading a model that has served is retried indefinitely when it can no longer be loaded."""

    def __init__(
        self,
        settings: WorkerSettings,
        model: ModelToServe,
        worker_id: str,
        engine: EngineSettings,
        process: EngineProcess,
        metrics: WorkerMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self.worker_id = worker_id
        self.served_name = model.served_name
        self.load_progress = 0.0
        """The fraction of its model that is loaded, from 0 to 1."""
        self.started: asyncio.Future[contract.EngineConfig] = asyncio.get_running_loop().create_future()
        """Done once the replica first serves. It never fails: `run` raises instead."""
        self.frontend: Frontend | None = None
        self.on_load: Callable[[internal.Control, OnProgress], None] | None = None
        """Loads more models alongside this one."""
        self._drain_requested = asyncio.Event()
        self._settings = settings
        self._model = model
        self._engine = engine
        self._process = process
        self._memory_fd: int | None = None
        self._metrics = ReplicaMetrics(metrics, model.served_name, worker_id)
        self._tracer = tracer
        self._health = HealthMonitor()
        self._config: contract.EngineConfig | None = None
        self._supervisor: EngineSupervisor | None = None
        self._logged_at = time.monotonic()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Replica {self.worker_id} of {self.served_name}>"

    def drain(self) -> None:
        """Starts draining; `run` returns when it is drained."""
        self._drain_requested.set()
        if self.frontend is not None:
            self.frontend.drain.request()

    @property
    def is_draining(self) -> bool:
        """Whether it was asked to leave, by its process or by a message."""
        asked = self.frontend is not None and self.frontend.drain.is_requested
        return asked or self._drain_requested.is_set()

    def apply_settings(self, settings: WorkerSettings) -> None:
        """Applies the settings that may change while the replica serves."""
        self._settings = settings
        if self.frontend is not None:
            self.frontend.apply_settings(settings.frontend)
        if self._supervisor is not None and self._supervisor.engine is not None:
            self._supervisor.engine.capacity.max_waiting = settings.max_waiting

    async def run(self) -> None:
        """Serves until drained. Raises EngineStartError if the model can't be served, ReplacedError if another worker
        takes the name, and ConnectionError if there is no broker."""
        structlog.contextvars.bind_contextvars(worker_id=self.worker_id)
        async with contextlib.AsyncExitStack() as connections:
            try:
                connection = await self._connect(connections, f"worker {self.worker_id}")
                incoming = await self._connect(connections, f"worker {self.worker_id} incoming")
            except shutdown.StoppedError:
                return
            connections.callback(self._metrics.forget)
            names = subjects.Subjects(self._settings.prefix)
            faults.lose_events(connection, names.events(self.served_name, self.worker_id), self._engine)
            settings, shown = self._settings.frontend, self._metrics
            frontend = Frontend(connection, names, self.served_name, self.worker_id, settings, shown, self._tracer)
            self.frontend = frontend
            frontend.on_load = self.on_load
            # asked to leave while connecting: its card was never published
            if self._drain_requested.is_set():
                return
            self._open_memory(connections)
            frontend.adapters.want(self._model.adapters)
            self._supervisor = self._make_supervisor()
            frontend.on_tick = self._tick
            connections.push_async_callback(frontend.close)
            await frontend.open(incoming, partial(nats.connect, self._settings.broker, f"worker {self.worker_id} kv"))
            await self._serve((connection, incoming), frontend)

    def _open_memory(self, connections: contextlib.AsyncExitStack) -> None:
        """Opens the in-memory file for copies of blocks, which the replica's engines use in turn."""
        fd = self._memory_fd = host_memory.open_memory()
        connections.callback(os.close, fd)

    async def _connect(self, connections: contextlib.AsyncExitStack, name: str) -> nats.Connection:
        connection = await shutdown.unless_stopped(
            self._drain_requested, nats.connect(self._settings.broker, name=name)
        )
        connections.push_async_callback(connection.close)
        return connection

    @property
    def unready_reason(self) -> str:
        """The reason why the replica should not be given requests, or empty."""
        failures = self._metrics.failures_in_a_row
        if failures >= MAX_FAILURES:
            return f"{self.worker_id}: the last {failures} requests have failed"
        return "" if self.frontend is not None and self.frontend.is_ready else f"{self.worker_id} is not ready"

    @property
    def is_loading(self) -> bool:
        """Whether an engine is being started."""
        return self.frontend is not None and self.frontend.state in (ReplicaState.STARTING, ReplicaState.RESTARTING)

    def describe(self) -> dict[str, Any]:
        """Returns its state, load and health as JSON values."""
        engine = self._supervisor.engine if self._supervisor is not None else None
        load = engine.load() if engine is not None else None
        return {
            "worker_id": self.worker_id,
            "model": self.served_name,
            "state": str(self.frontend.state) if self.frontend is not None else "connecting",
            "reason": self.unready_reason,
            "load": msgspec.to_builtins(load),
            "health": msgspec.to_builtins(self._health.latest),
        }

    def update_gauges(self) -> None:
        """Updates the replica's gauges for a scrape."""
        self._metrics.loading.set(self.is_loading)
        engine = self._supervisor.engine if self._supervisor is not None else None
        if engine is not None and self._config is not None:
            assert self.frontend is not None
            self._metrics.update_gauges(engine.load(), self._config)
            self._metrics.ready.set(not self.unready_reason)
            self._metrics.unguarded.set(self.frontend.num_unguarded)
            self._metrics.adapters.set(len(self.frontend.adapters))
            self._metrics.kv_leases.set(self.frontend.num_leases)
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
        elif config.memory is not None:
            self._log_memory(config, config.memory)
        self._config = config
        if self._supervisor is not None and self._supervisor.engine is not None:
            self._health.engine_started(self._supervisor.engine, config)
        self._engine = successor_settings(self._engine, config)
        assert self.frontend is not None
        self.frontend.engine_started(engine, config)
        if not self.started.done():
            self.started.set_result(config)

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

    def copies_recovered(self, recovery: RecoveredCopies) -> None:
        """Logs and counts the copies that an engine has recovered from an earlier one."""
        self._metrics.observe_recovery(recovery)
        if recovery.blocks or recovery.discarded:
            self._log.info(
                "host_cache_recovered",
                blocks=recovery.blocks,
                bytes=recovery.num_bytes,
                discarded=dict(recovery.discarded),
            )

    def memory_poisoned(self) -> None:
        """Counts an engine that ends because its memory is poisoned."""
        self._metrics.poisoned_engines.inc()

    def engine_died(self) -> None:
        """Announces that there is no engine for now."""
        assert self.frontend is not None
        self._health.engine_died()
        self.frontend.engine_died()

    def step_computed(self, stats: ipc.StepStats) -> None:
        """Counts a step."""
        self._metrics.observe_step(stats)

    def kv_pool_changed(self, stats: ipc.KvPoolStats) -> None:
        """Shows the engine's part of the KV pool, and logs and counts what it has given up for other replicas."""
        self._metrics.observe_kv_pool(stats)
        idle, preempted = stats.reclaimed_idle, stats.reclaimed_used
        if idle or preempted:
            self._log.info("kv_reclaimed", held_bytes=stats.held, idle_bytes=idle, preempted_bytes=preempted)

    def constraint_compiled(self, compiled: ipc.ConstraintCompiled) -> None:
        """Observes how long a constraint took, and counts it if it was refused."""
        self._metrics.observe_constraint(compiled)

    def constraint_given_up(self) -> None:
        """Counts a constraint that could not be followed to its end."""
        self._metrics.constraint_refusals.labels("given_up").inc()

    def blocks_refused(self, count: int) -> None:
        """Counts fetched blocks that could not be used."""
        self._metrics.kv_refused_blocks.inc(count)

    def prompt_progress(self, key: str, computed_tokens: int, cached_tokens: int) -> None:
        """Logs a prompt that takes long."""
        assert self.frontend is not None
        self.frontend.prompt_progress(key, computed_tokens, cached_tokens)

    def token_interval(self, seconds: float, count: int) -> None:
        """Counts intervals between tokens."""
        self._metrics.itl.observe_many(seconds, count)

    def step_done(self) -> None:
        """Publishes a step's chunks."""
        assert self.frontend is not None
        self.frontend.step_done()

    def _make_supervisor(self) -> EngineSupervisor:
        assert self.frontend is not None
        prepare = self.frontend.adapters.load_all
        timeout_s = self._settings.step_timeout_s
        return EngineSupervisor(
            self._make_engine, self.worker_id, self, timeout_s, prepare, is_patient=self._is_patient
        )

    async def _run_engines(self) -> None:
        """Runs engines, one after another. Raises EngineStartError."""
        assert self._supervisor is not None
        await self._supervisor.run()

    def _make_engine(self) -> EngineClient:
        settings = self._engine
        if self._config is None and self._supervisor is not None:
            settings = cautious_settings(settings, self._supervisor.restarts)
        return EngineClient(lambda: self._process.open(settings, self._memory_fd), self._settings.max_waiting)

    def _tick(self, now: float, gap_s: float) -> None:
        assert self._supervisor is not None
        assert self.frontend is not None
        self._supervisor.tick(now, gap_s)
        engine = self._supervisor.engine
        if self._health.tick(now, engine):
            self.frontend.health_read(self._health.latest)
        if engine is not None and self._config is not None:
            self._metrics.count_load(engine.load())

    async def _serve(self, buses: Iterable[Bus], frontend: Frontend) -> None:
        lives = [self._run_engines(), frontend.run(), *(bus.wait_closed() for bus in buses)]
        if self._model.adapter_folder:
            path, tenants = split_tenants(self._model.adapter_folder)
            lives.append(AdapterFolder(Path(path), tenants, frontend.adapters).run())
        running: list[asyncio.Task[None]] = [tasks.awaited(life) for life in lives]
        left = tasks.awaited(frontend.drain.wait())
        try:
            await asyncio.wait([left, *running], return_when=asyncio.FIRST_COMPLETED)
            # if one has failed, its error is why the replica ends
            for task in running:
                if task.done():
                    task.result()
            assert self._supervisor is not None
            await self._drain(self._supervisor, frontend)
        finally:
            left.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(left, *running, return_exceptions=True)
            frontend.announce_stopped()

    async def _drain(self, supervisor: EngineSupervisor, frontend: Frontend) -> None:
        """Accepts nothing new, lets running requests finish within the grace period, asks routers to take the rest, and
        ends what no router has taken: with what was generated if it can't be continued, else with an error."""
        frontend.change(ReplicaEvent.DRAIN)
        self._log.info("draining", grace_s=self._settings.grace_s)
        engine = supervisor.engine
        if engine is not None:
            await frontend.drain.finish(engine.drain(), self._settings.grace_s)
        await frontend.leave(self._settings.handover_s)
        await supervisor.cleanup()
        self._log.info("drained")
