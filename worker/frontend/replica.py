"""One replica as the front sees it: a worker on the wire, with a connection, a card and a supervised engine."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.process import stopping
from tokenbus.protocol.telemetry import traces
from tokenbus.protocol.wire import internal, subjects
from tokenbus.worker import contract
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine_client.engine import ChildEngine
from tokenbus.worker.engine_client.link import EngineProcess
from tokenbus.worker.engine_client.supervise import Supervisor
from tokenbus.worker.frontend.front import Front
from tokenbus.worker.frontend.metrics import ReplicaMetrics, WorkerMetrics
from tokenbus.worker.frontend.settings import Say, WorkerSettings

_LOADING_LINE_S = 2.0


class Replica:
    """Lives from `run` until it is drained. Its engine is a step loop in `process`."""

    def __init__(
        self,
        settings: WorkerSettings,
        served_name: str,
        worker_id: str,
        engine: EngineSettings,
        process: EngineProcess,
        metrics: WorkerMetrics,
        traced: traces.Traces,
    ) -> None:
        self.worker_id = worker_id
        self.served_name = served_name
        self.loaded = 0.0
        """How much of its model is loaded, from 0 to 1."""
        self.started: asyncio.Future[contract.EngineConfig] = asyncio.get_running_loop().create_future()
        """Done when it serves for the first time. Never fails: `run` does."""
        self.front: Front | None = None
        self.on_load: Callable[[internal.Control, Say], None] | None = None
        """Who loads more models beside this one."""
        self._leave = asyncio.Event()
        self._settings = settings
        self._engine = engine
        self._process = process
        self._metrics = ReplicaMetrics(metrics, served_name, worker_id)
        self._traces = traced
        self._config: contract.EngineConfig | None = None
        self._supervisor: Supervisor | None = None
        self._said_at = time.monotonic()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Replica {self.worker_id} of {self.served_name}>"

    def leave(self) -> None:
        """Has it drained: `run` returns when that is done."""
        self._leave.set()
        if self.front is not None:
            self.front.drain_asked.set()

    def adopt(self, settings: WorkerSettings) -> None:
        """What of the settings may change while it serves."""
        self._settings = settings
        if self.front is not None:
            self.front.adopt(settings.front)
        if self._supervisor is not None and self._supervisor.engine is not None:
            self._supervisor.engine.places.max_waiting = settings.max_waiting

    async def run(self) -> None:
        """Until drained. Raises EngineStartError for a model that can't be served, ReplacedError when another worker
        has taken the name, and ConnectionError when there is no broker."""
        structlog.contextvars.bind_contextvars(worker_id=self.worker_id)
        async with contextlib.AsyncExitStack() as connections:
            try:
                connection = await self._connect(connections, f"worker {self.worker_id}")
                incoming = await self._connect(connections, f"worker {self.worker_id} incoming")
            except stopping.StoppedError:
                return
            connections.callback(self._metrics.forget)
            names = subjects.Subjects(self._settings.prefix)
            settings, shown = self._settings.front, self._metrics
            front = Front(connection, names, self.served_name, self.worker_id, settings, shown, self._traces)
            self.front = front
            front.on_load = self.on_load
            if self._leave.is_set():
                return
            supervisor = Supervisor(self._make_engine, self.worker_id, self, self._settings.step_timeout_s)
            self._supervisor = supervisor
            front.on_pulse = self._pulse
            await front.open(incoming)
            await self._live((connection, incoming), supervisor, front)

    async def _connect(self, connections: contextlib.AsyncExitStack, name: str) -> nats.Connection:
        connection = await stopping.unless(self._leave, nats.connect(self._settings.broker, name=name))
        connections.push_async_callback(connection.close)
        return connection

    @property
    def why_not_ready(self) -> str:
        """Empty while it takes requests."""
        return "" if self.front is not None and self.front.is_ready else f"{self.worker_id} is not ready"

    def show(self) -> None:
        """Brings its levels up to date, for a scrape."""
        engine = self._supervisor.engine if self._supervisor is not None else None
        if engine is not None and self._config is not None:
            self._metrics.show(engine.load(), self._config, is_ready=not self.why_not_ready)

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """A restart finds the same files and takes no more memory than the first."""
        if self._config is not None:
            self._metrics.restarted()
        self._config = config
        self._engine = msgspec.structs.replace(self._engine, files=config.files, kv_limit_bytes=config.kv_bytes)
        assert self.front is not None
        self.front.engine_started(engine, config)
        if not self.started.done():
            self.started.set_result(config)

    def engine_died(self) -> None:
        assert self.front is not None
        self.front.engine_died()

    def _make_engine(self) -> ChildEngine:
        assert self.front is not None
        settings = self._engine
        engine = ChildEngine(lambda: self._process.open(settings), self._settings.max_waiting)
        engine.on_step = self.front.step_done
        engine.on_note = self._metrics.step
        engine.on_interval = self._metrics.interval
        engine.on_blocks = self.front.blocks_changed
        engine.on_loading = self._note_loading
        return engine

    def _pulse(self, now: float, gap_s: float) -> None:
        assert self._supervisor is not None
        self._supervisor.watch(now, gap_s)
        engine = self._supervisor.engine
        if engine is not None and self._config is not None:
            self._metrics.take_load(engine.load())

    def _note_loading(self, fraction: float) -> None:
        """Says how far a model is loaded, every few seconds of a long load."""
        self.loaded = fraction
        now = time.monotonic()
        if now - self._said_at >= _LOADING_LINE_S:
            self._said_at = now
            self._log.info("model_loading", percent=round(100 * fraction))

    async def _live(self, buses: Iterable[Bus], supervisor: Supervisor, front: Front) -> None:
        lives = (supervisor.run(), front.run(), *(bus.until_refused() for bus in buses))
        tasks: list[asyncio.Task[None]] = [asyncio.create_task(life) for life in lives]
        left = asyncio.create_task(front.drain_asked.wait())
        try:
            await asyncio.wait([left, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await self._drain(supervisor, front)
        finally:
            left.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(left, *tasks, return_exceptions=True)
            front.left()

    async def _drain(self, supervisor: Supervisor, front: Front) -> None:
        """Takes nothing new, lets what runs finish within the grace period, ends the rest."""
        front.leave()
        self._log.info("draining", grace_s=self._settings.grace_s)
        engine = supervisor.engine
        if engine is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.grace_s):
                    await engine.drain()
        await supervisor.cleanup()
        self._log.info("drained")
