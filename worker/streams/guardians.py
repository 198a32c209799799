"""Makes sure that each stream has a guardian: the router that continues it if this worker is lost or leaves.

At first that is the router that placed it. Once a second each guardian is asked whether it still knows its streams. A
guardian that misses several answers is frozen, and counts as gone although the broker holds its connection; routers of
earlier versions, which answer only if they don't know a stream, never count as silent. A stream without a guardian is
offered to the routers, one of which gets the offer. The router that accepts is named in the event log, and only the
router that was named last acts on the stream."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import (
    Bus,
    NoRespondersError,
    OutboundBufferLimitError,
    Outgoing,
    PayloadTooLargeError,
    is_no_responders,
)
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, internal, limits, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.stream import WorkerStream
from tokenbus.worker.streams.streams import Streams

_replies = codec.Decoder(internal.GuardReply)
_unguarded = codec.Decoder(internal.Unguarded)
_CHECK_INTERVAL_S = 1.0
_CONFIRM_S = 0.05
"""If a router's subject has no subscriber, the router is asked again after this time: it may just be reconnecting."""
_MAX_UNANSWERED = 3
"""A guardian that misses this many checks in a row counts as gone."""
_ANSWERING_TTL_S = 3_600.0
_MAX_ANSWERING = 256
"""The number of routers that a worker remembers as answering every check."""
_MAX_KEY_BYTES = 3 * limits.MAX_NAME_BYTES + limits.MAX_ID_BYTES + 8
"""The most bytes that a request's key takes in a message."""
_OFFERED_BYTES = 4 * 1024 * 1024
"""The most bytes of offers that are published at once. If a router that is gone had many streams with long prompts, all
their offers together could delay pings for so long that the frontend fences itself."""


class Guardians:
    """The guardians of one worker's streams."""

    def __init__(
        self, connection: Bus, names: subjects.Subjects, announcer: Announcer, outbox: Outbox, streams: Streams
    ) -> None:
        self._connection = connection
        self._names = names
        self._announcer = announcer
        self._outbox = outbox
        self._streams = streams
        self._replies_to = names.worker(announcer.model, announcer.worker_id, "guarded")
        self._checked_at = 0.0
        self._unheard_since: dict[str, float] = {}
        """When the broker first reported that a router's subject has no subscriber, by the router's subject token."""
        self._answering: TTLCache[bool] = TTLCache(_ANSWERING_TTL_S, _MAX_ANSWERING)
        """Routers that have answered a check about streams that they know, by subject token."""
        self._num_unanswered: Counter[str] = Counter()
        """Checks since the last answer, by the router's subject token."""
        self._passing_on: set[str] = set()
        """Routers that pass cancels and resyncs on to this worker, and have answered the last check, by subject
        token."""
        self.listen: Callable[[bool], None] = lambda wanted: None
        """Called with whether cancels and resyncs of some stream may not be passed on to this worker."""
        self._sender: PartsSender | None = None
        self._large_offers: dict[str, asyncio.Task[None]] = {}
        """Offers being sent in parts, by the stream's key."""
        self._log = structlog.get_logger().bind(worker_id=announcer.worker_id)

    def __repr__(self) -> str:
        return f"<Guardians {sorted({str(stream.guardian) for stream in self._streams})}>"

    async def open(self, own: OwnSubjects, sender: PartsSender) -> None:
        """Subscribes. The broker sends its no-responders notices over the connection that asked."""
        self._sender = sender
        subject = self._names.worker(self._announcer.model, self._announcer.worker_id, "unguarded.*")
        await self._connection.subscribe(subject, self._on_unguarded)
        own.serve("guarded", self._on_reply)

    def tick(self, now: float) -> None:
        """Once a second, asks every guardian, and offers the streams that have none."""
        if now - self._checked_at < _CHECK_INTERVAL_S:
            self._say_if_heard()
            return
        self._checked_at = now
        self._passing_on.difference_update(self._num_unanswered)
        self._lose_silent(now)
        self._say_if_heard()
        for router_id, keys in self._guarded().items():
            self._check(router_id, keys)
        self._offer([stream for stream in self._streams if stream.guardian is None])
        for token in [token for token, since in self._unheard_since.items() if now - since >= _CHECK_INTERVAL_S / 2]:
            del self._unheard_since[token]

    def accepted(self, run: internal.Run) -> None:
        """Notes which router has placed a stream here."""
        token = subjects.escape(run.router_id)
        if run.passes_on and token and token not in self._num_unanswered:
            self._passing_on.add(token)
        self._say_if_heard()

    def _say_if_heard(self) -> None:
        """Says whether every stream, ended ones included, has a guardian that passes on what its client asks for."""
        guardians = {stream.guardian or "" for stream in self._streams} | self._streams.ended_guardians.keys()
        tokens = {subjects.escape(one) for one in guardians}
        self._passing_on &= tokens
        self.listen(not tokens <= self._passing_on)

    def _guarded(self) -> dict[str, list[str]]:
        """Returns the keys of each guardian's streams; none if they have all ended."""
        guarded: defaultdict[str, list[str]] = defaultdict(list)
        for router_id in filter(None, self._streams.ended_guardians):
            guarded[router_id] = []
        for stream in self._streams:
            if stream.guardian:
                guarded[stream.guardian].append(stream.key)
        return guarded

    def _lose_silent(self, now: float) -> None:
        """Takes their streams from guardians that have stopped answering."""
        guarded = {subjects.escape(router_id) for router_id in self._guarded()}
        for token, count in list(self._num_unanswered.items()):
            if token not in guarded or count >= _MAX_UNANSWERED:
                del self._num_unanswered[token]
            if token in guarded and count >= _MAX_UNANSWERED and self._answering.get(token, now):
                self._lose(token, list(self._of(token)))

    def _check(self, router_id: str, keys: list[str]) -> None:
        reply = self._names.unguarded(self._announcer.model, self._announcer.worker_id, router_id)
        num_fitting = max(1, self._outbox.room_bytes // _MAX_KEY_BYTES)
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):  # asked again a second later
            for at in range(0, max(1, len(keys)), num_fitting):
                check = internal.GuardCheck(request_ids=keys[at : at + num_fitting])
                self._connection.publish(self._names.router(router_id), codec.encode(check), reply)
            self._num_unanswered[subjects.escape(router_id)] += 1

    def _on_unguarded(self, message: Msg) -> None:
        token, now = message.subject.rpartition(".")[2], time.monotonic()
        if not is_no_responders(message):
            try:
                answer = _unguarded.decode(message.data)
            except errors.RequestError as error:
                self._log.error("unguarded_refused", error=str(error))
                return
            missing = set(answer.request_ids)
            if answer.passes_on:
                self._passing_on.add(token)
            self._answering.put(token, True, now)
            self._num_unanswered.pop(token, None)
            self._lose(token, [stream for stream in self._of(token) if stream.key in missing])
            return
        if token == subjects.NO_ROUTER:
            self._passing_on.clear()
            self._say_if_heard()
            return
        self._passing_on.discard(token)
        self._say_if_heard()
        if token not in self._unheard_since:
            self._unheard_since[token] = now
            asyncio.get_running_loop().call_later(_CONFIRM_S, self._check_again, token)
        elif now - self._unheard_since[token] >= _CONFIRM_S:
            self._lose(token, list(self._of(token)))

    def _check_again(self, token: str) -> None:
        for router_id, keys in self._guarded().items():
            if subjects.escape(router_id) == token:
                self._check(router_id, keys[:1])

    def _of(self, token: str) -> Iterator[WorkerStream]:
        """Returns the streams whose guardian has this subject token."""
        return (one for one in self._streams if one.guardian and subjects.escape(one.guardian) == token)

    def _lose(self, token: str, streams: Sequence[WorkerStream]) -> None:
        if not streams:
            return
        self._log.warning("guardian_lost", router_id=streams[0].guardian, streams=len(streams))
        for stream in streams:
            stream.guardian = None
        self._say_if_heard()
        self._offer(streams)

    def _offer(self, streams: Sequence[WorkerStream]) -> None:
        """Offers each stream to one router, with the tokens that all earlier log entries reported for it."""
        if not streams or not self._outbox.flush():
            return
        subject = self._names.guard(self._announcer.model, self._announcer.worker_id)
        num_bytes, now = 0, time.monotonic()
        for stream in sorted(streams, key=lambda stream: stream.offered_at):
            if stream.terminal is not None:  # the flush has ended it
                continue
            if stream.key in self._large_offers:
                continue
            guard = internal.Guard(run=stream.to_run(now), stream_no=stream.stream_no, hash_scheme=stream.hash_scheme)
            payload = codec.encode(guard)
            num_bytes += len(payload)
            if num_bytes > _OFFERED_BYTES and num_bytes > len(payload):
                return
            stream.offered_at = now
            if self._sender is not None and not self._sender.fits(payload):
                self._start_large(self._sender, stream, Outgoing(subject, payload, self._replies_to))
                continue
            try:
                self._connection.publish(subject, payload, self._replies_to)
            except (OutboundBufferLimitError, ConnectionError):
                return

    def _start_large(self, sender: PartsSender, stream: WorkerStream, offer: Outgoing) -> None:
        task = tasks.background("offer a large stream", self._offer_large(sender, stream, offer))
        self._large_offers[stream.key] = task
        task.add_done_callback(lambda _: self._large_offers.pop(stream.key))

    async def _offer_large(self, sender: PartsSender, stream: WorkerStream, offer: Outgoing) -> None:
        """Sends an offer in parts. Unless that fails for good, a failed offer is sent again a second later."""
        try:
            last = await sender.stage(offer)
            self._connection.publish(last.subject, last.payload, last.reply, last.headers)
        except (NoRespondersError, OutboundBufferLimitError, TimeoutError, ConnectionError):
            return
        except (PayloadTooLargeError, errors.RequestError) as error:
            if isinstance(error, errors.RequestError) and error.error.code is not errors.Code.PAYLOAD_TOO_LARGE:
                return
            stream.guardian = ""  # no router can take it
            self._log.error("stream_not_offered", request_id=stream.key)

    def _on_reply(self, message: Msg) -> None:
        try:
            reply = _replies.decode(message.data)
            validation.check_router_id(reply.router_id)
        except errors.RequestError as error:
            self._log.error("guard_reply_refused", error=str(error))
            return
        stream = self._streams.find(reply.request_id)
        if stream is None or stream.run.attempt != reply.attempt or stream.guardian is not None:
            return
        if not reply.accepted:
            return
        stream.guardian = reply.router_id
        if reply.passes_on:
            self._passing_on.add(subjects.escape(reply.router_id))
        self._announcer.log.guardians[stream.stream_no] = reply.router_id
        self._announcer.publish_events()
        self._log.info(
            "guardian_changed",
            request_id=stream.key,
            router_id=reply.router_id,
        )
