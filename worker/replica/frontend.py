"""A worker's frontend: connects streams, announcer and endpoints to a bus, and stops publishing when it must."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, lease_time
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal, limits, subjects
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.fence import Fence
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState, Serving
from tokenbus.worker.contract import contract
from tokenbus.worker.kv_exchange.exchange import KvExchange
from tokenbus.worker.kv_exchange.transport import Connect
from tokenbus.worker.replica.drain import Drain
from tokenbus.worker.replica.endpoints import Endpoints, OnLoad, OnWant, WorkerCommands
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.guardians import Guardians
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.streams import Streams
from tokenbus.worker.telemetry.metrics import ReplicaMetrics

_PART_TIMEOUT_S = 1.0
_TICK_FAILED_INTERVAL_S = 10.0
"""A part of the tick that keeps failing is logged this often."""
_LINGER_S = 1.0
"""After giving up its last stream, a worker stays reachable this long: for routers that got no reply, and for workers
that fetch the streams' blocks."""


class ReplacedError(RuntimeError):
    """Another worker has taken this one's name; the message says what to do."""


class Frontend:
    """Serves one worker over a bus, with the engine that it is given.

    It has two connections. Everything that it publishes leaves over one, in order, and the fence watches that one.
    Messages from others arrive over the second, so that a flood of them can't delay the broker's answers to pings."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        model: str,
        worker_id: str,
        settings: FrontendSettings,
        metrics: ReplicaMetrics,
        tracer: tracing.Tracer,
        on_load: OnLoad | None = None,
        on_want: OnWant | None = None,
    ) -> None:
        """`on_load` loads more models alongside this one; None if that is not possible. `on_want` loads this one; None
        if it is loaded from the start."""
        self._on_want = on_want
        self._bus = bus
        self._names = names
        self.announcer = Announcer(bus, names, model, worker_id, settings.role, settings.site)
        telemetry = StreamTelemetry(metrics, tracer, model, worker_id)
        self._outbox = Outbox(bus, self.announcer, telemetry)
        self.adapters = Adapters(self.announcer.publish_card)
        self.announcer.adapters = self.adapters.cards
        self.adapters.in_use = lambda: self.streams.adapter_digests
        self.exchange = KvExchange(self.announcer, metrics)
        self.streams = Streams(self.announcer, self._outbox, telemetry, settings, self.exchange, self.adapters)
        self.drain = Drain()
        self._replaced_by: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        commands = WorkerCommands(self.drain, self.adapters, self.want, self.replaced, on_load)
        prefixes = settings.inbox_prefixes
        self._endpoints = Endpoints(bus, names, self.announcer, self.streams, prefixes, commands, metrics)
        self._guardians = Guardians(bus, names, self.announcer, self._outbox, self.streams)
        self._fence = Fence(lease_time())
        self._tick_failed_at: dict[str, float] = {}
        """When each part of the tick was last logged as failing."""
        self._log = structlog.get_logger()
        self.on_tick: Callable[[float, float], None] = lambda now, gap_s: None
        """Called a few times a second with the time, and the seconds since the last call."""

    def __repr__(self) -> str:
        return f"<Frontend {self.announcer!r} {self.streams!r} {self._fence!r}>"

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted now."""
        return self.announcer.state is ReplicaState.READY and not self.announcer.is_muted

    async def open(self, incoming: Bus, connect: Connect | None = None) -> None:
        """Subscribes to the worker's subjects over `incoming`. `connect` opens another connection, for other workers'
        KV blocks; without it, none are exchanged."""
        self._fence.reset(lease_time())
        self._bus.guard = self._may_publish
        self._bus.on_reconnect = self._reconnected
        # Parts leave over `incoming`, so that no chunk queues behind one, and the broker's notices come back over it.
        model, worker_id = self.announcer.model, self.announcer.worker_id
        received = ReplyInbox(incoming, partial(self._names.received, model, worker_id))
        sender = PartsSender(incoming, received, timeout_s=_PART_TIMEOUT_S, tries=2)
        await self._guardians.open(incoming, sender)
        if connect is not None:
            await self.exchange.open(incoming, self._names, connect)
        await self._endpoints.open(incoming, sender)

    async def close(self) -> None:
        """Closes the connection for KV blocks, if there is one, and the adapters' files."""
        self.adapters.close()
        await self.exchange.close()

    async def run(self) -> None:
        """Runs until cancelled. Raises ReplacedError if another frontend takes this one's name."""
        self._fence.reset(lease_time())
        running = [tasks.awaited(life) for life in (self.announcer.run_heartbeat(), self._tick())]
        try:
            await asyncio.gather(*running, self._replaced_by)
        finally:
            for task in running:
                task.cancel()

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """Sends requests to this engine from now on, unless the worker accepts none any more."""
        serving = Serving(engine, config)
        engine.on_kv_events = self.announcer.blocks_changed
        self.streams.engine_started(serving)
        self.exchange.engine_changed(serving)
        self.announcer.engine_started(serving)

    def engine_died(self) -> None:
        """Announces that there is no engine, before any stream ends because of it. Safe to call again."""
        if self.announcer.serving is not None:
            self.exchange.engine_changed(None)
            self.announcer.engine_died()

    def want(self) -> internal.ControlReply:
        """Starts loading the model if necessary; returns the progress."""
        if self._on_want is not None and not self.announcer.state.is_ending:
            return self._on_want()
        return internal.ControlReply(ok=True, progress=float(self.announcer.serving is not None))

    def step_done(self) -> None:
        """Publishes a step's chunks. Called when every sink has received its outputs."""
        self._outbox.flush()

    async def wait_left(self) -> None:
        """Returns when no stream is open, routers whose connections broke have had time to ask again for streams that
        they took, and the workers that continue these have fetched their blocks."""
        await self.streams.wait_none()
        if self.streams.has_taken:
            await asyncio.sleep(_LINGER_S)
        await self.exchange.wait_no_leases()

    def announce_stopped(self) -> None:
        """Announces that the worker has stopped, if there is still a connection."""
        with contextlib.suppress(ConnectionError):
            self.announcer.change(ReplicaEvent.STOP)

    def replaced(self, reason: str) -> None:
        """Abandons every stream without a terminal: another frontend has this one's name."""
        if not self._replaced_by.done():
            self._log.error("replaced", worker_id=self.announcer.worker_id, streams=repr(self.streams))
            self._fence_off()
            self._replaced_by.set_exception(ReplacedError(reason))

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            self._bus.ping()
            await asyncio.sleep(limits.TICK_S)
            now = time.monotonic()
            # before anything is published, so that a pause of the process is noticed
            self._fence.tick(lease_time())
            if self._check_fence():
                self._look_after("streams", self.streams.tick)
                self._look_after("guardians", partial(self._guardians.tick, now))
            self._look_after("kv exchange", partial(self.exchange.tick, now))
            self._look_after("engine", partial(self.on_tick, now, now - ticked_at))
            ticked_at = now

    def _look_after(self, part: str, tick: Callable[[], None]) -> None:
        """Calls `tick`. If that raises, the other parts still run, and this one runs again at the next tick; only the
        fence must not fail."""
        try:
            tick()
        except Exception as error:  # outermost frame of a part
            now = time.monotonic()
            if now - self._tick_failed_at.get(part, -_TICK_FAILED_INTERVAL_S) >= _TICK_FAILED_INTERVAL_S:
                self._tick_failed_at[part] = now
                self._log.error("task_failed", task=f"tick of {part}", exc_info=error)

    def _may_publish(self) -> bool:
        """Guards every write. While muted, writes are safe: what the old epoch buffered went with its connection."""
        return self.announcer.is_muted or self._check_fence()

    def _check_fence(self) -> bool:
        self._fence.ping_answered(self._bus.confirmed_at)
        if not self.announcer.is_muted and not self._fence.check(lease_time()):
            self._log.error("self_fenced", worker_id=self.announcer.worker_id, streams=repr(self.streams))
            self._fence_off()
        return not self.announcer.is_muted

    def _fence_off(self) -> None:
        """Abandons every stream without a terminal and starts a new epoch, to be announced on a new connection."""
        self.announcer.start_epoch()
        self.streams.abandon_all()
        self._bus.abort()

    def _reconnected(self) -> None:
        if self._replaced_by.done():
            return  # announcing a new epoch would replace the very frontend that has replaced this one
        self.streams.reconnected()
        if self.announcer.is_muted:
            self._fence.reset(lease_time())
            self.announcer.announce_epoch()
        else:
            self.announcer.publish_card()
