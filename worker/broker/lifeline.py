"""Keeps a worker process alive in the eyes of routers: its connections, its fence, and the timer of its replicas.

All replicas of a process share two connections. Everything that they publish leaves over one, in order, and the fence
watches that one. Messages from others arrive over the second, so that a flood of them can't delay the broker's answers
to pings. A process that was frozen, or cut off from the broker, was so with all its replicas: the fence cuts them off
together, and all begin the same new epoch."""

import asyncio
import contextvars
import time
from typing import Protocol

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import OwnedBus, lease_time
from tokenbus.protocol.wire import limits
from tokenbus.worker.broker.announcer import Announcer, new_epoch
from tokenbus.worker.broker.fence import Fence

_TICK_S = 0.8 * limits.HEARTBEAT_S
"""Less than the promised interval, since the event loop may be busy."""


class Member(Protocol):
    """A replica, as far as its process looks after it. Nothing here may raise."""

    @property
    def announcer(self) -> Announcer: ...

    @property
    def num_streams(self) -> int:
        """The streams that are open."""
        ...

    def epoch_ended(self, next_epoch: str) -> None:
        """Abandons every stream, and publishes nothing until `reconnected`."""
        ...

    def reconnected(self) -> None:
        """Announces the replica again: the connection is back, perhaps in a new epoch."""
        ...

    def tick(self, now: float, gap_s: float) -> None:
        """Checks the replica's timers, `gap_s` after the last time, by `time.monotonic`."""
        ...


class Lifeline:
    """The connections of one worker process, and what decides whether its replicas may publish."""

    def __init__(self, bus: OwnedBus, incoming: OwnedBus) -> None:
        """Replicas publish over `bus` and receive over `incoming`, each through a `BusShare`."""
        self.bus = bus
        self.incoming = incoming
        self.epoch = new_epoch()
        self.is_muted = False
        """Whether nothing may be published: the old epoch is over and the new one has no connection yet."""
        self._is_given_up = False
        self._fence = Fence(lease_time())
        self._members: dict[Member, contextvars.Context] = {}
        bus.guard = self._may_publish
        bus.on_reconnect = self._reconnected

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

    async def run(self) -> None:
        """Runs until cancelled. Raises ConnectionError once the broker has closed a connection for good."""
        self._fence.reset(lease_time())
        lives = (self._tick(), self.bus.wait_closed(), self.incoming.wait_closed())
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

    def give_up(self) -> None:
        """Cuts the replicas off for good: they announce no other epoch."""
        self._is_given_up = True
        self._fence_off()

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            self.bus.ping()
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # before anything is published, so that a pause of the process is noticed
            self._fence.tick(lease_time())
            self.check_fence()
            for member, context in list(self._members.items()):
                context.run(member.tick, now, now - ticked_at)
            ticked_at = now

    def _may_publish(self) -> bool:
        """Guards every write. While muted, writes are safe: what the old epoch buffered went with its connection."""
        return self.is_muted or self.check_fence()

    def _fence_off(self) -> None:
        self.is_muted, self.epoch = True, new_epoch()
        for member, context in self._members.items():
            context.run(member.epoch_ended, self.epoch)
        self.bus.abort()

    def _reconnected(self) -> None:
        if self._is_given_up:
            return  # announcing a new epoch would replace the very process that has replaced this one
        if self.is_muted:
            self._fence.reset(lease_time())
            self.is_muted = False
        for member, context in self._members.items():
            context.run(member.reconnected)
