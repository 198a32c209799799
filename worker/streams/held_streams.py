"""Holds the streams of one worker, probes their clients, and lets them flow again or gives them up."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from tokenbus.protocol.bus.bus import lease_time
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.holds import Hold, Holds, Patience
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.router_reach import RouterReach
from tokenbus.worker.streams.stream import WorkerStream


class StreamOwner(Protocol):
    """The owner of the streams."""

    def __iter__(self) -> Iterator[WorkerStream]:
        """Yields the open streams."""
        ...

    def find_any(self, key: str) -> WorkerStream | None:
        """Returns a stream that is open, or has ended not long ago."""
        ...

    def abandon(self, stream: WorkerStream, reason: str) -> None:
        """Ends an open stream without a terminal."""
        ...

    def cancel(self, key: str) -> bool:
        """Ends an open stream with `cancelled`."""
        ...

    def drop(self, key: str, attempt: int, *, moved: bool = False) -> bool:
        """Ends a stream without a terminal. If it has `moved`, it may have ended, and is no longer replayed."""
        ...


class HeldStreams:
    """The streams of one worker that are held: open ones, and those that ended while they were, or just before."""

    def __init__(
        self,
        owner: StreamOwner,
        outbox: Outbox,
        reach: RouterReach,
        telemetry: StreamTelemetry,
        settings: FrontendSettings,
    ) -> None:
        self._owner = owner
        self._outbox = outbox
        self._reach = reach
        self._telemetry = telemetry
        self._holds = Holds(Patience(settings.gone_after_s, settings.link_patience_s))
        self._is_link_suspect = False
        outbox.on_late = self.hold_unconfirmed

    def __repr__(self) -> str:
        return repr(self._holds)

    def __iter__(self) -> Iterator[WorkerStream]:
        for key in self._holds:
            stream = self._owner.find_any(key)
            if stream is not None and stream.hold is not None:
                yield stream
            else:
                self._holds.forget(key)

    def no_responders(self, key: str, mark: int | None) -> None:
        """Handles a no-responders notice: the chunk with this mark has not reached its client, or a probe (None) has
        not."""
        if mark is None:
            self._holds.missed(key)
            return
        stream = self._owner.find_any(key)
        if stream is not None and not stream.is_given_up and (carried := stream.marks.carried(mark)) is not None:
            self._hold(stream)
            stream.lacks(*carried)

    def hold_unconfirmed(self) -> None:
        """Holds the streams of distant guardians that have not confirmed them for too long."""
        now, until = lease_time(), math.inf
        for stream in self._owner:
            if stream.hold is None and now >= (deadline := self._reach.publish_until(stream.guardian)):
                self._hold(stream)
            elif stream.hold is None:
                until = min(until, deadline)
        self._outbox.publish_until = until

    def asked(self, stream: WorkerStream, offset: int, prompt_offset: int | None) -> None:
        """Notes that the client of a held stream asks for lost chunks: it can be reached, and says what it has."""
        assert stream.hold is not None, stream
        stream.skip()
        stream.lacks(offset, prompt_offset)
        self._reached(stream.hold, stream)

    def repeat_end(self, key: str, offset: int) -> None:
        """Publishes a stream that has ended again from token `offset` on, for a guardian that has missed its end. Where
        no link lies between them, only that router was late: the client has the end."""
        stream = self._owner.find_any(key)
        if stream is None or stream.is_open:
            return
        if not self._reach.is_distant(stream.guardian or stream.run.router_id):
            return
        stream.lacks(offset, None)
        if stream.hold is None:
            self._outbox.publish_again(stream, time.monotonic())
        else:
            self._reached(stream.hold, stream)

    def tick(self) -> None:
        """Probes the clients of held streams; lets streams flow again, or gives them up."""
        self.hold_unconfirmed()
        now = lease_time()
        is_suspect = self._note_link(now)
        if not self._holds:
            return
        self._holds.confirmed(self._outbox.confirmed_at)
        for stream in list(self):
            if self._settle(stream, now):
                continue
            if self._holds.is_over(stream.key, stream.num_tokens, now, is_link_suspect=is_suspect):
                self._give_up(stream, now)
        due = set(self._holds.due_probes(now))
        for stream in self:
            if stream.key in due and self._outbox.probe(stream):
                self._holds.probed(stream.key, now)
        self._holds.expire(now)

    def probe_flowing(self, streams: Iterable[WorkerStream]) -> None:
        """Finds out at once whether the clients of some streams can be reached: those that can't are held."""
        for stream in streams:
            self._outbox.put_head(stream, time.monotonic())
        self._outbox.flush()

    def probe_again(self, streams: Iterable[WorkerStream]) -> None:
        """Finds out again whether the clients of held streams can be reached: earlier probes may have been taken by a
        broker that did not know yet that its link was down."""
        for stream in streams:
            if stream.hold is not None:
                stream.hold.probed_at = stream.hold.reached_at = None
                stream.hold.probe_due_at = lease_time()

    def reconnected(self) -> None:
        """Gives no client up for a while: after a reconnect, clients may still be reconnecting too."""
        self._holds.reconnected(lease_time())

    def disown(self, stream: WorkerStream) -> None:
        """Gives up a stream that another worker continues, as its guardian says; it may have ended here."""
        self._owner.drop(stream.key, stream.run.attempt, moved=True)
        self.forget(stream)

    def forget(self, stream: WorkerStream) -> None:
        """Forgets a stream that has ended."""
        self._holds.forget(stream.key)
        stream.hold = None

    def clear(self) -> None:
        """Forgets every stream."""
        self._holds.clear()

    def _note_link(self, now: float) -> bool:
        """Returns whether a link seems to be down while streams are held. Once none does any more, all are probed at
        once."""
        is_suspect = len(self._holds) > 0 and self._reach.is_link_suspect(now)
        if is_suspect and not self._is_link_suspect:
            self._telemetry.link_suspected(self._reach.to_ask(now), len(self._holds))
        elif self._is_link_suspect and not is_suspect:
            self._telemetry.link_back(len(self._holds))
            self._holds.hurry(now)
        self._is_link_suspect = is_suspect
        return is_suspect

    def _hold(self, stream: WorkerStream) -> None:
        """Publishes nothing more for a stream, for now."""
        if stream.hold is None:
            is_blind = not stream.is_streamed
            stream.hold = self._holds.hold(stream.key, stream.num_tokens, lease_time(), is_blind=is_blind)
            self._telemetry.held(stream)

    def _reached(self, hold: Hold, stream: WorkerStream) -> None:
        """Notes that somebody asks for what the client of a held stream lacks: it can be reached."""
        hold.reached_at = hold.reached_at or lease_time()
        self._settle(stream, lease_time())

    def _settle(self, stream: WorkerStream, now: float) -> bool:
        """Lets a held stream flow again if its client can be reached and its guardian has confirmed it since; returns
        whether it does."""
        assert stream.hold is not None, stream
        if stream.hold.reached_at is None or not self._reach.has_ruled(stream.guardian, stream.hold.reached_at, now):
            return False
        # whether a client that gets one message is there shows only when that is sent: too late if it has another
        if stream.hold.is_blind and self._reach.is_link_suspect(now) and not self._reach.confirms(stream.guardian, now):
            return False
        if not self._outbox.flush():
            return False
        hold = self._holds.release(stream.key, stream.num_tokens, now)
        stream.hold = None
        self._telemetry.released(stream, now - hold.since, stream.num_tokens - stream.published)
        self._outbox.publish_again(stream, time.monotonic())
        return True

    def _give_up(self, stream: WorkerStream, now: float) -> None:
        """Ends a stream that was held for too long. If its guardian may have given it to another worker, its client
        gets nothing more from this one, not even a terminal."""
        assert stream.hold is not None, stream
        held_s = now - stream.hold.since
        if stream.hold.is_blind and stream.terminal is None:
            stream.guardian = None  # its client has missed nothing yet: it is offered to other routers
            stream.hold = None
            self._holds.release(stream.key, stream.num_tokens, now)
            return
        self.forget(stream)
        stream.is_given_up = True
        if not stream.is_open:
            return
        self._telemetry.client_gone(stream, held_s)
        stream.skip()
        if not self._reach.confirms(stream.guardian, now):
            self._owner.abandon(stream, "unconfirmed")
        elif stream.terminal is not None:
            self._outbox.publish_again(stream, time.monotonic())
        else:
            self._owner.cancel(stream.key)
