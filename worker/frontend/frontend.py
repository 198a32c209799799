"""A worker's frontend: joins streams, announcements and subjects together, and falls silent when it must."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from tokenbus.protocol.bus import clock
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal, limits, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.endpoints import Endpoints
from tokenbus.worker.broker.fence import Fence
from tokenbus.worker.broker.outbox import Outbox
from tokenbus.worker.frontend.metrics import ReplicaMetrics
from tokenbus.worker.frontend.settings import FrontendSettings, OnProgress
from tokenbus.worker.streams.streams import Streams


class ReplacedError(RuntimeError):
    """Another frontend lives under this one's name; says what to do."""


class Frontend:
    """Serves one worker over a bus, with whatever engine it is given. Times are of one monotonic clock.

    It has two connections. Everything it says goes out over one, in order, and the fence watches that one. What others
    say to it comes in over the other, where a flood of it delays no sign of the broker."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        model: str,
        worker_id: str,
        settings: FrontendSettings,
        metrics: ReplicaMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._bus = bus
        self._announcer = Announcer(bus, names, model, worker_id)
        self.metrics = metrics
        self._outbox = Outbox(bus, self._announcer, self.metrics)
        self._streams = Streams(self._announcer, self._outbox, self.metrics, settings, tracer)
        self.drain_requested = asyncio.Event()
        self._replaced_by: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._endpoints = Endpoints(
            bus, names, self._announcer, self._streams, settings.inbox_prefixes, self, self.metrics
        )
        self._fence = Fence(clock.now())
        self._is_draining = False
        self._has_engine = False
        self.on_load: Callable[[internal.Control, OnProgress], None] | None = None
        """Loads more models beside this one; None where nobody can."""
        self._log = structlog.get_logger()
        self.on_tick: Callable[[float, float], None] = lambda now, gap_s: None
        """Called a few times a second with the time and how long ago the last call was."""
        bus.guard = self._may_publish
        bus.on_reconnect = self._reconnected

    def __repr__(self) -> str:
        return f"<Frontend {self._announcer!r} {self._streams!r} {self._fence!r}>"

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self._has_engine and not self._is_draining and not self._announcer.is_muted

    def apply_settings(self, settings: FrontendSettings) -> None:
        """Other settings for streams from now on."""
        self._streams.settings = settings

    async def open(self, incoming: Bus) -> None:
        """Subscribes over `incoming` to everything that the worker serves. It speaks over the other connection."""
        await self._endpoints.open(incoming)

    async def run(self) -> None:
        """Until cancelled. Raises ReplacedError when another frontend has taken this one's name."""
        self._fence.reset(clock.now())
        lives = (self._announcer.run_heartbeat(), self._tick(), self._until_replaced())
        tasks = [asyncio.create_task(life) for life in lives]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """Requests go to this engine from now on."""
        self._has_engine = True
        bundle = engine.tokenizer_bundle()
        self._streams.set_engine(engine, config)
        self._endpoints.set_engine(engine)
        self._announcer.engine_started(engine, config, prompt.bundle_digest(bundle) if bundle else None)
        if self._is_draining:
            self._announcer.set_state(messages.WorkerState.DRAINING)

    def engine_died(self) -> None:
        """There is no engine for now: says so before the streams say that they have lost it."""
        if not self._has_engine:
            return
        self._has_engine = False
        self._streams.clear_engine()
        self._endpoints.set_engine(None)
        if not self._is_draining:
            self._announcer.engine_died()

    def blocks_changed(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        """Which cached blocks the engine has lost and won."""
        self._announcer.blocks_changed(removed, stored)

    def step_done(self) -> None:
        """All sinks have had what a step brought: publishes it."""
        self._outbox.flush()

    def start_draining(self) -> None:
        """Takes nothing new from now on."""
        self._is_draining = True
        self._announcer.set_state(messages.WorkerState.DRAINING)

    def announce_stopped(self) -> None:
        """The worker's last word, where there is still somebody to hear it."""
        with contextlib.suppress(ConnectionError):
            self._announcer.set_state(messages.WorkerState.STOPPED)

    def replaced(self, reason: str) -> None:
        """Another frontend has this one's name: its streams are given up without a word."""
        if not self._replaced_by.done():
            self._log.error("replaced", worker_id=self._announcer.worker_id, streams=repr(self._streams))
            self._fence_off()
            self._replaced_by.set_exception(ReplacedError(reason))

    async def _until_replaced(self) -> None:
        await self._replaced_by

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            self._bus.ping()
            await asyncio.sleep(limits.TICK_S)
            now = time.monotonic()
            self._fence.ping_answered(self._bus.confirmed_at)
            self._fence.tick(clock.now())
            if self._check_fence():
                self._streams.tick()
            self.on_tick(now, now - ticked_at)
            ticked_at = now

    def _may_publish(self) -> bool:
        """What an earlier life has published went with its connection, so that nothing stale can wait here."""
        return self._announcer.is_muted or self._check_fence()

    def _check_fence(self) -> bool:
        self._fence.ping_answered(self._bus.confirmed_at)
        if not self._announcer.is_muted and not self._fence.check(clock.now()):
            self._log.error("self_fenced", worker_id=self._announcer.worker_id, streams=repr(self._streams))
            self._fence_off()
        return not self._announcer.is_muted

    def _fence_off(self) -> None:
        """Gives every stream up without a word and begins a new life, which it announces on a new connection."""
        self._announcer.start_epoch()
        self._streams.abandon_all()
        self._bus.abort()

    def _reconnected(self) -> None:
        if self._replaced_by.done():
            return  # it has nothing more to say: a new epoch would replace the frontend that has replaced it
        self._streams.reconnected()
        if self._announcer.is_muted:
            self._fence.reset(clock.now())
            self._announcer.announce_epoch()
        else:
            self._announcer.publish_card()
