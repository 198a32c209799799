"""Keeps a worker process alive in the eyes of routers: its connections, its fence, its beats, its replicas' timer.

All replicas of a process share two connections. Everything that they publish leaves over one, in order, and the fence
watches that one. Messages from others arrive over the second, so that a flood of them can't delay the broker's answers
to pings. A process that was frozen, or cut off from the broker, was so with all its replicas: the fence cuts them off
together, and all begin the same new epoch.

A replica that has work publishes an entry of its event log every 200 ms. The idle ones are silent, and the process
speaks for them with one message every 800 ms, a beat (decision 0012)."""

import asyncio
import contextlib
import contextvars
import time
from collections import defaultdict
from typing import Protocol

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.bus.bus import OutboundBufferLimitError, OwnedBus, is_no_responders, lease_time
from tokenbus.protocol.wire import codec, internal, limits, subjects
from tokenbus.worker.broker.announcer import Announcer, new_epoch
from tokenbus.worker.broker.fence import Fence

_TICK_S = 0.8 * limits.HEARTBEAT_S
"""Less than the promised interval, since the event loop may be busy."""
_IDLE_TICK_S = 0.4
"""The same while all replicas are idle. Several pings are answered in the time that the fence allows."""
_BEAT_S = 2 * _IDLE_TICK_S
"""Less than `limits.BEAT_S`, which is promised."""
_RESUME_TIMEOUT_S = 0.5
"""Time for the broker to say that no router has given this epoch up."""
_SPREAD_S = 0.1
"""Time in which the brokers of a cluster have told each other of a subscription, there and back."""


class Member(Protocol):
    """A replica, as far as its process looks after it. Nothing here may raise."""

    @property
    def announcer(self) -> Announcer: ...

    @property
    def num_streams(self) -> int:
        """The streams that are open."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether it has no work that a router waits for."""
        ...

    def epoch_ended(self, next_epoch: str) -> None:
        """Abandons every stream, and publishes nothing until `reconnected`."""
        ...

    def reconnected(self) -> None:
        """Announces the replica again: the connection is back, perhaps in a new epoch."""
        ...

    def tick(self, now: float, gap_s: float, *, is_spoken_for: bool) -> None:
        """Checks the replica's timers, `gap_s` after the last time, by `time.monotonic`. One that `is_spoken_for`
        publishes no heartbeats."""
        ...


class Lifeline:
    """The connections of one worker process, and what decides whether its replicas may publish."""

    def __init__(self, bus: OwnedBus, incoming: OwnedBus, names: subjects.Subjects, process: str) -> None:
        """Replicas publish over `bus` and receive over `incoming`, each through a `BusShare`."""
        self.bus = bus
        self.incoming = incoming
        self._names = names
        self.process = process
        """Its name, unique among the processes that serve a model."""
        self.audit: AuditWriter | None = None
        """Writes what operators have the process do, if that is wanted."""
        self.epoch = new_epoch()
        self.run_name = self.epoch
        """Names this run of the process."""
        self._unconfirmed: set[str] = set()
        """After a reconnect, the `alive` subjects of the replicas that some router may have given up meanwhile."""
        self._all_confirmed = asyncio.Event()
        self.is_muted = False
        """Whether nothing may be published: the old epoch is over and the new one has no connection yet."""
        self._is_given_up = False
        self._failure: Exception | None = None
        """Why a replica may still have streams of an epoch that is over, so that nothing may be published any more."""
        self._fence = Fence(lease_time())
        self._members: dict[Member, contextvars.Context] = {}
        self._may_beat = True
        """False once the broker's permissions have forbidden a beat."""
        self._beat_at = 0.0
        self.num_beats = 0
        self._has_work = asyncio.Event()
        self._is_resting = False
        """Whether the next tick may come later."""
        bus.guard = self._may_publish
        bus.before_resume = self._before_resume
        bus.on_reconnect = self._reconnected
        bus.on_permissions_violation = self._permissions_violated

    def __repr__(self) -> str:
        return f"<Lifeline of {len(self._members)} replicas, {self._fence!r}>"

    @property
    def worker_ids(self) -> list[str]:
        """The names of all replicas."""
        return [member.announcer.worker_id for member in self._members]

    def join(self, member: Member) -> None:
        """Looks after a replica from now on, in the present context."""
        self._members[member] = contextvars.copy_context()

    def leave(self, member: Member) -> None:
        """Forgets a replica. Safe to call again."""
        self._members.pop(member, None)

    def has_work(self) -> None:
        """Ends a longer pause between two ticks: a replica is no longer idle."""
        if self._is_resting:
            self._has_work.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises ConnectionError once the broker has closed a connection for good, and what a
        replica raised instead of ending its epoch."""
        self._fence.reset(lease_time())
        lives = (self._live(), self.bus.wait_closed(), self.incoming.wait_closed())
        running = [tasks.awaited(life) for life in lives]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    def check_fence(self) -> bool:
        """Returns whether anything may be published now. If not, the epoch is over."""
        self._fence.ping_answered(self.bus.confirmed_at)
        if not self.is_muted and not self._fence.check(lease_time()):
            num_streams = sum(member.num_streams for member in self._members)
            structlog.get_logger().error("self_fenced", worker_ids=self.worker_ids, streams=num_streams)
            self._fence_off()
        return not self.is_muted

    def alive_heard(self, message: Msg) -> None:
        """Takes what arrives on a replica's `alive` subject. Routers' questions there are answered by the broker alone;
        its notice that nobody hears `given_up` belongs to a question of this process."""
        if is_no_responders(message):
            self._unconfirmed.discard(message.subject)
            if not self._unconfirmed:
                self._all_confirmed.set()

    def give_up(self) -> None:
        """Cuts the replicas off for good: they announce no other epoch."""
        self._is_given_up = True
        self._fence_off()

    async def _live(self) -> None:
        ticked_at = time.monotonic()
        while True:
            self.bus.ping()
            await self._pause()
            now = time.monotonic()
            # before anything is published, so that a pause of the process is noticed
            self._fence.tick(lease_time())
            self.check_fence()
            if self._failure is not None:
                raise self._failure
            self._tick(now, now - ticked_at)
            ticked_at = now

    async def _pause(self) -> None:
        if not self._is_resting:
            await asyncio.sleep(_TICK_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_TICK_S):
                await self._has_work.wait()
        self._has_work.clear()

    def _tick(self, now: float, gap_s: float) -> None:
        idle = [member for member in self._members if member.is_idle] if self._may_beat else []
        self._is_resting = self._may_beat and len(idle) == len(self._members)
        spoken_for = set(idle)
        for member, context in list(self._members.items()):
            context.run(member.tick, now, gap_s, is_spoken_for=member in spoken_for)
        # an entry makes routers expect another one soon, unless a beat tells them otherwise
        has_spoken = any(member.announcer.published_at > self._beat_at for member in idle)
        if idle and not self.is_muted and (has_spoken or now - self._beat_at >= _BEAT_S - _TICK_S / 2):
            self._beat(idle)

    def _beat(self, idle: list[Member]) -> None:
        seqs: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for member in idle:
            announcer = member.announcer
            if announcer.last_seq is not None:
                seqs[announcer.model][announcer.worker_id] = announcer.last_seq
        for model, of_model in seqs.items():
            beat = internal.Beat(epoch=self.epoch, next_ms=1e3 * limits.BEAT_S, seqs=of_model)
            try:
                self.bus.publish(self._names.beat(model, self.process), codec.encode(beat))
            except OutboundBufferLimitError:
                return  # at the next tick
        self._beat_at = time.monotonic()
        self.num_beats += 1

    def _permissions_violated(self, words: str) -> None:
        """Learns what the broker's permissions forbid. Without beats, replicas speak for themselves; without `alive`,
        routers can't learn from the broker that this process is gone; without `given_up`, an epoch ends with its
        connection."""
        words, log = words.lower(), structlog.get_logger()
        if self._may_beat and f"{self._names.prefix}.beat.".lower() in words:
            self._may_beat = False
            self.has_work()
            log.error("beats_not_permitted", worker_ids=self.worker_ids)
        if f".alive.{self.run_name}" in words:
            for member in self._members:
                if member.announcer.process_run:
                    member.announcer.process_run = ""
                    member.announcer.publish_card()
            log.error("alive_not_permitted", worker_ids=self.worker_ids)
        if f"{self._names.prefix}.router.given_up:".lower() in words:
            log.error("given_up_not_permitted", worker_ids=self.worker_ids)

    def _may_publish(self) -> bool:
        """Guards every write. While muted, writes are safe: what the old epoch buffered went with its connection."""
        return self._failure is None and (self.is_muted or self.check_fence())

    def _fence_off(self) -> None:
        self.is_muted, self.epoch = True, new_epoch()
        for member, context in self._members.items():
            try:
                context.run(member.epoch_ended, self.epoch)
            except Exception as error:  # outermost frame of a replica: the fence falls for the others in any case
                self._failure = error
        self.bus.abort()

    async def _before_resume(self) -> None:
        """Ends the epoch if a router has given it up while this process was disconnected.

        A router hears `given_up` before it asks for the last time whether anybody hears `alive`, and this process hears
        `alive` again before it asks whether anybody hears `given_up`. So one of them learns of the other."""
        if self.is_muted or self._failure is not None:
            return  # a new epoch, or none
        if self.bus.network != self.bus.broker_id:
            await asyncio.sleep(_SPREAD_S)
        announcers = [member.announcer for member in self._members]
        asked = {self._alive(one): self._given_up(one) for one in announcers if one.has_card and one.process_run}
        if not asked:
            return
        epoch, self._unconfirmed, self._all_confirmed = self.epoch, set(asked), asyncio.Event()
        for alive, given_up in asked.items():
            self.bus.ask(given_up, alive)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESUME_TIMEOUT_S):
                await self._all_confirmed.wait()
        if self._unconfirmed and self.epoch == epoch and not self.is_muted:
            structlog.get_logger().error("epoch_given_up", worker_ids=self.worker_ids, epoch=epoch)
            self._fence_off()

    def _alive(self, announcer: Announcer) -> str:
        return self._names.alive(announcer.model, announcer.worker_id, self.run_name)

    def _given_up(self, announcer: Announcer) -> str:
        return self._names.given_up(announcer.model, announcer.worker_id, announcer.epoch)

    def _reconnected(self) -> None:
        if self._failure is not None:
            return  # the process ends
        if self._is_given_up:
            return  # announcing a new epoch would replace the very process that has replaced this one
        if self.is_muted:
            self._fence.reset(lease_time())
            self.is_muted = False
        for member, context in self._members.items():
            context.run(member.reconnected)
