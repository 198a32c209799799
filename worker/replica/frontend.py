"""A worker's frontend: connects streams, announcer and endpoints to the connections of its process."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import structlog

from tokenbus.protocol.bus.bus_share import BusShare
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal, subjects
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState, Serving
from tokenbus.worker.contract import contract
from tokenbus.worker.kv_exchange.exchange import KvExchange
from tokenbus.worker.kv_exchange.transport import Connect
from tokenbus.worker.replica.drain import Drain
from tokenbus.worker.replica.endpoints import Endpoints, OnLoad, OwnModel, WorkerCommands
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.guardians import Guardians
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.router_reach import RouterReach
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
    """Serves one worker over its share of a process's connections, with the engine that it is given."""

    def __init__(
        self,
        line: Lifeline,
        names: subjects.Subjects,
        model: str,
        worker_id: str,
        settings: FrontendSettings,
        metrics: ReplicaMetrics,
        tracer: tracing.Tracer,
        on_load: OnLoad | None = None,
        own_model: OwnModel | None = None,
    ) -> None:
        """`on_load` loads more models alongside this one; None if that is not possible. `own_model` is None if this one
        is loaded from the start."""
        self._own_model = own_model
        self._line = line
        self.bus, self._incoming = bus, _ = BusShare(line.bus), BusShare(line.incoming)
        self._names = names
        self.announcer = Announcer(
            bus, names, model, worker_id, settings.role, settings.site, line.epoch, line.process, line.run_name
        )
        telemetry = StreamTelemetry(metrics, tracer, model, worker_id)
        self._outbox = Outbox(bus, self.announcer, telemetry)
        self.adapters = Adapters(self.announcer.publish_card)
        self.announcer.adapters = self.adapters.cards
        self.adapters.in_use = lambda: self.streams.adapter_digests
        self.exchange = KvExchange(self.announcer, metrics)
        reach = RouterReach(lambda: bus.network)
        self.streams = Streams(self.announcer, self._outbox, telemetry, settings, self.exchange, self.adapters, reach)
        self.drain = Drain()
        self._replaced_by: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        release = None if own_model is None else own_model.release
        commands = WorkerCommands(self.drain, self.adapters, self.want, release, self.replaced, on_load, line)
        prefixes = settings.inbox_prefixes
        self._endpoints = Endpoints(bus, names, self.announcer, self.streams, prefixes, commands, metrics)
        self._guardians = Guardians(bus, names, self.announcer, self._outbox, self.streams, reach)
        self._guardians.listen = lambda wanted: self._endpoints.clients.listen(wanted=wanted)
        self.streams.on_accepted = self._guardians.accepted
        self._tick_failed_at: dict[str, float] = {}
        """When each part of the tick was last logged as failing."""
        self._log = structlog.get_logger()
        self.on_tick: Callable[[float, float], None] = lambda now, gap_s: None
        """Called a few times a second with the time, and the seconds since the last call."""

    def __repr__(self) -> str:
        return f"<Frontend {self.announcer!r} {self.streams!r}>"

    @property
    def num_streams(self) -> int:
        """The streams that are open."""
        return len(self.streams)

    @property
    def is_idle(self) -> bool:
        """Whether it has no work that a router waits for."""
        return not len(self.streams) and not self._endpoints.num_calls and self.announcer.is_idle

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted now."""
        return self.announcer.state is ReplicaState.READY and not self.announcer.is_muted

    async def open(self, connect: Connect | None = None) -> None:
        """Subscribes to the worker's subjects. `connect` opens another connection, for other workers' KV blocks;
        without it, none are exchanged."""
        self.announcer.is_muted = self._line.is_muted
        self._line.join(self)
        # Parts leave over `incoming`, so that no chunk queues behind one, and the broker's notices come back over it.
        incoming, model, worker_id = self._incoming, self.announcer.model, self.announcer.worker_id
        received = ReplyInbox(incoming, partial(self._names.received, model, worker_id))
        sender = PartsSender(incoming, received, timeout_s=_PART_TIMEOUT_S, tries=2)
        own = OwnSubjects(incoming, self._names, model, worker_id)
        await self._guardians.open(own, sender)
        if connect is not None:
            await self.exchange.open(incoming, self._names, connect, own)
        await self._endpoints.open(incoming, own, sender)

    async def close(self) -> None:
        """Ends the subscriptions, the connection for KV blocks if there is one, and the adapters' files."""
        self._line.leave(self)
        self.adapters.close()
        await self.exchange.close()
        await asyncio.gather(self.bus.close(), self._incoming.close())

    async def wait_replaced(self) -> None:
        """Never returns; raises ReplacedError if another frontend takes this one's name."""
        await self._replaced_by

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
        if self._own_model is not None and not self.announcer.state.is_ending:
            return self._own_model.want()
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
            self._line.give_up()
            self._replaced_by.set_exception(ReplacedError(reason))

    def tick(self, now: float, gap_s: float, *, is_spoken_for: bool) -> None:
        """Looks after each part, and publishes an entry if one is due."""
        if not self.announcer.is_muted:
            self._look_after("streams", self.streams.tick)
            self._look_after("guardians", partial(self._guardians.tick, now))
        self._look_after("kv exchange", partial(self.exchange.tick, now))
        self._look_after("engine", partial(self.on_tick, now, gap_s))
        self._look_after("heartbeat", partial(self.announcer.tick, now, is_silent=is_spoken_for))

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

    def epoch_ended(self, next_epoch: str) -> None:
        """Abandons every stream without a terminal, and publishes nothing until `reconnected`."""
        self.announcer.start_epoch(next_epoch)
        self.streams.abandon_all()

    def reconnected(self) -> None:
        """Announces the worker again, after a fence under its new epoch."""
        self.streams.held.reconnected()
        if self.announcer.is_muted:
            self.announcer.announce_epoch()
        else:
            self.announcer.publish_card()
