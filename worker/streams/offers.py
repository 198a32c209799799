"""Offers streams that have no guardian to the routers: each offer reaches one of them, which accepts it or not.

A router refuses a stream while it does not know everything that the worker's log says about it, as one that has just
started. The next offer may reach another router, or this one when it knows more. So a refused offer is soon made again,
at the worker's next tick, and if it is refused again and again, after twice the time before. An offer without an answer
may still be accepted, and waits longer."""

import asyncio
from collections.abc import Sequence

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, NoRespondersError, OutboundBufferLimitError, Outgoing, PayloadTooLargeError
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import codec, errors, internal, subjects
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.stream import WorkerStream

_ANSWER_S = 0.9
"""An offer without an answer is made again at the first tick after this time."""
_REFUSED_S = 0.1
"""A refused one after this time, and whenever it is refused again, after twice as long, up to the time above."""
_MAX_BYTES = 4 * 1024 * 1024
"""The most bytes of offers that are published within `_ANSWER_S`. If a router that is gone had many streams with long
prompts, all their offers together could delay pings for so long that the frontend fences itself."""


class _Timer:
    """When a stream is to be offered. Times are seconds of `time.monotonic`."""

    __slots__ = ("_offered_at", "_refused_s", "due_at")

    def __init__(self, now: float) -> None:
        self.due_at = self._offered_at = now
        self._refused_s = _REFUSED_S

    def offered(self, now: float) -> None:
        self._offered_at, self.due_at = now, now + _ANSWER_S

    def refused(self) -> None:
        self.due_at, self._refused_s = self._offered_at + self._refused_s, min(2 * self._refused_s, _ANSWER_S)


class Offers:
    """The offers of one worker's streams."""

    def __init__(self, connection: Bus, names: subjects.Subjects, announcer: Announcer, outbox: Outbox) -> None:
        self._connection = connection
        self._subject = names.guard(announcer.model, announcer.worker_id)
        self._replies_to = names.worker(announcer.model, announcer.worker_id, "guarded")
        self._outbox = outbox
        self._timers: dict[str, _Timer] = {}
        """Those of the streams without a guardian, by key."""
        self._began_at = 0.0
        self._num_bytes = 0
        """The bytes of offers that were published since then."""
        self._sender: PartsSender | None = None
        self._large: dict[str, asyncio.Task[None]] = {}
        """Offers being sent in parts, by the stream's key."""
        self._log = structlog.get_logger().bind(worker_id=announcer.worker_id)

    def __repr__(self) -> str:
        return f"<Offers of {len(self._timers)} streams>"

    def open(self, sender: PartsSender) -> None:
        """`sender` sends offers that do not fit in a message."""
        self._sender = sender

    def make(self, unguarded: Sequence[WorkerStream], now: float) -> None:
        """Makes the offers that are due, of all streams that have no guardian: the first one of each stream at once."""
        self._timers = {stream.key: self._timers.get(stream.key) or _Timer(now) for stream in unguarded}
        due = [stream for stream in unguarded if self._timers[stream.key].due_at <= now]
        if not due or not self._outbox.flush():
            return
        if now - self._began_at >= _ANSWER_S:
            self._began_at, self._num_bytes = now, 0
        for stream in sorted(due, key=lambda stream: self._timers[stream.key].due_at):
            if stream.terminal is not None or stream.key in self._large:  # the flush may have ended it
                continue
            if not self._make_one(stream, now):
                return

    def refused(self, stream: WorkerStream) -> None:
        """Notes that a router has refused a stream."""
        if (timer := self._timers.get(stream.key)) is not None:
            timer.refused()

    def _make_one(self, stream: WorkerStream, now: float) -> bool:
        """Offers a stream to one router, with the tokens that all earlier log entries reported for it; returns False if
        nothing more can be offered now."""
        guard = internal.Guard(run=stream.to_run(now), stream_no=stream.stream_no, hash_scheme=stream.hash_scheme)
        offer = Outgoing(self._subject, codec.encode(guard), self._replies_to)
        if self._num_bytes and self._num_bytes + len(offer.payload) > _MAX_BYTES:
            return False
        if self._sender is not None and not self._sender.fits(offer.payload):
            self._start_large(self._sender, stream, offer)
        else:
            try:
                self._connection.publish(offer.subject, offer.payload, offer.reply)
            except (OutboundBufferLimitError, ConnectionError):
                return False
        self._num_bytes += len(offer.payload)
        self._timers[stream.key].offered(now)
        return True

    def _start_large(self, sender: PartsSender, stream: WorkerStream, offer: Outgoing) -> None:
        task = tasks.background("offer a large stream", self._make_large(sender, stream, offer))
        self._large[stream.key] = task
        task.add_done_callback(lambda _: self._large.pop(stream.key))

    async def _make_large(self, sender: PartsSender, stream: WorkerStream, offer: Outgoing) -> None:
        """Sends an offer in parts. Unless that fails for good, a failed offer is sent again a second later."""
        try:
            last = await sender.stage(offer)
            self._connection.publish(last.subject, last.payload, last.reply, last.headers)
        except (NoRespondersError, OutboundBufferLimitError, TimeoutError, ConnectionError):
            return
        except (PayloadTooLargeError, errors.RequestError) as error:
            if isinstance(error, errors.RequestError) and error.error.code is not errors.Code.PAYLOAD_TOO_LARGE:
                return
            if stream.guardian is not None:  # a router has accepted an earlier, smaller offer meanwhile
                return
            stream.guardian = ""  # no router can take it
            self._log.error("stream_not_offered", request_id=stream.key)
