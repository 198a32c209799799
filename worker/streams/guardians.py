"""Makes sure that each stream has a guardian: the router that continues it if this worker is lost or leaves.

At first that is the router that placed it. Once a second each guardian is asked whether it still knows its streams, and
twice a second if a link lies between (`router_reach.py`). A guardian that answers nothing for three seconds is frozen,
and counts as gone although the broker holds its connection. A stream without a guardian is offered to the routers, one
of which gets the offer. The router that accepts is named in the event log, and only the router that was named last acts
on the stream.

A guardian that is out of reach together with its streams' clients is not gone: the link to both is down. It keeps its
streams, which are held, and says whether it has given them to another worker once the link is up again."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, is_no_responders, lease_time
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, internal, limits, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.fence import FENCE_S
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.streams.offers import Offers
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.router_reach import RouterReach, token_of
from tokenbus.worker.streams.stream import WorkerStream
from tokenbus.worker.streams.streams import Streams

_replies = codec.Decoder(internal.GuardReply)
_unguarded = codec.Decoder(internal.Unguarded)
_CHECK_INTERVAL_S = 1.0
_CONFIRM_S = 0.05
"""If a router's subject has no subscriber, the router is asked again after this time: it may just be reconnecting."""
_UNHEARD_TTL_S = 0.5
"""Two notices that are further apart say nothing together: the router may have listened in between."""
_MAX_UNANSWERED = 3
"""A guardian that misses this many rounds of checks in a row counts as gone."""
_MAX_UNHEARD = 256
"""The number of routers that a worker remembers as not heard."""
_MAX_KEY_BYTES = 3 * limits.MAX_NAME_BYTES + limits.MAX_ID_BYTES + 8
"""The most bytes that a request's key takes in a message."""


class Guardians:
    """The guardians of one worker's streams."""

    def __init__(
        self,
        connection: Bus,
        names: subjects.Subjects,
        announcer: Announcer,
        outbox: Outbox,
        streams: Streams,
        reach: RouterReach,
    ) -> None:
        self._connection = connection
        self._names = names
        self._announcer = announcer
        self._outbox = outbox
        self._streams = streams
        self._offers = Offers(connection, names, announcer, outbox)
        self._reach = reach
        self._checked_at = 0.0
        self._num_ticks = 0
        self._num_unanswered: Counter[str] = Counter()
        """Rounds since the last answer, by the router's subject token."""
        self._numbers = itertools.count(1)
        self._unheard_since: TTLCache[float] = TTLCache(_UNHEARD_TTL_S, _MAX_UNHEARD)
        """When the broker first reported that a router's subject has no subscriber, by the router's subject token."""
        self._passing_on: set[str] = set()
        """Routers that pass cancels and resyncs on to this worker, and have answered the last check, by subject
        token."""
        self.listen: Callable[[bool], None] = lambda wanted: None
        """Called with whether cancels and resyncs of some stream may not be passed on to this worker."""
        self._log = structlog.get_logger().bind(worker_id=announcer.worker_id)

    def __repr__(self) -> str:
        return f"<Guardians {sorted({str(stream.guardian) for stream in self._streams})}>"

    async def open(self, own: OwnSubjects, sender: PartsSender) -> None:
        """Subscribes. The broker sends its no-responders notices over the connection that asked."""
        self._offers.open(sender)
        subject = self._names.worker(self._announcer.model, self._announcer.worker_id, "unguarded.*")
        await self._connection.subscribe(subject, self._on_unguarded)
        own.serve("guarded", self._on_reply)

    def tick(self, now: float) -> None:
        """Asks every guardian once a second, distant ones more often, and offers the streams that have none."""
        is_round = now - self._checked_at >= _CHECK_INTERVAL_S
        if is_round:
            self._checked_at = now
            self._passing_on.difference_update(self._num_unanswered)
            self._lose_silent()
        self._ask(is_round=is_round)
        self._say_if_heard()
        self._offer(now)

    def accepted(self, run: internal.Run) -> None:
        """Notes which router has placed a stream here."""
        token = token_of(run.router_id)
        if token and token not in self._num_unanswered:
            self._passing_on.add(token)
        self._say_if_heard()

    def _say_if_heard(self) -> None:
        """Says whether every stream, ended ones included, has a guardian that passes on what its client asks for."""
        guardians = {stream.guardian or "" for stream in self._streams} | self._streams.ended_guardians.keys()
        tokens = {token_of(one) for one in guardians}
        self._passing_on &= tokens
        self.listen(not tokens <= self._passing_on)

    def _guarded(self) -> dict[str, Sequence[WorkerStream]]:
        """Returns each guardian's streams: the open ones, and those that are held although they have ended; none if all
        have ended."""
        guarded: defaultdict[str, list[WorkerStream]] = defaultdict(list)
        for router_id in filter(None, self._streams.ended_guardians):
            guarded[router_id] = []
        for stream in dict.fromkeys((*self._streams, *self._streams.held)):
            if stream.guardian:
                guarded[stream.guardian].append(stream)
        return dict(guarded)

    def _lose_silent(self) -> None:
        """Takes their streams from guardians that have stopped answering, unless the link to them seems to be down."""
        guarded = self._guarded()
        for token in self._num_unanswered.keys() - {token_of(router_id) for router_id in guarded}:
            del self._num_unanswered[token]
        for router_id, streams in guarded.items():
            token = token_of(router_id)
            if self._num_unanswered[token] < _MAX_UNANSWERED:
                continue
            if self._reach.is_distant(router_id) and self._reach.is_link_suspect(lease_time()):
                continue
            del self._num_unanswered[token]
            self._lose(token, [stream for stream in streams if stream.terminal is None])

    def _ask(self, *, is_round: bool) -> None:
        """Asks every guardian in a round, and between two rounds distant ones: every second time, or each time if a
        client that was out of reach waits for the answer."""
        self._num_ticks += 1
        held = list(self._streams.held)
        # some guard nothing here, but show whether their links are up
        asked: dict[str, Sequence[WorkerStream]] = dict.fromkeys(self._reach.to_ask(lease_time()), ()) if held else {}
        awaited = {stream.guardian for stream in held if stream.hold is not None and stream.hold.reached_at}
        for router_id, streams in (asked | self._guarded()).items():
            is_due = is_round or (
                self._reach.is_distant(router_id) and (self._num_ticks % 2 == 0 or router_id in awaited)
            )
            if is_due and self._check(router_id, streams) and is_round:
                self._num_unanswered[token_of(router_id)] += 1

    def _check(self, router_id: str, streams: Sequence[WorkerStream]) -> bool:
        """Asks a router about some streams; returns whether that could be published."""
        reply = self._names.unguarded(self._announcer.model, self._announcer.worker_id, router_id)
        num_fitting = max(1, self._outbox.room_bytes // _MAX_KEY_BYTES)
        try:
            for at in range(0, max(1, len(streams)), num_fitting):
                some = streams[at : at + num_fitting]
                check = internal.GuardCheck(
                    request_ids=[stream.key for stream in some],
                    attempts=[stream.run.attempt for stream in some],
                    epoch=self._announcer.epoch,
                    number=next(self._numbers),
                )
                self._connection.publish(self._names.router(router_id), codec.encode(check), reply)
                self._reach.asked(router_id, check.number, lease_time())
        except (OutboundBufferLimitError, ConnectionError):  # asked again a second later
            return False
        return True

    def _on_unguarded(self, message: Msg) -> None:
        token, now = message.subject.rpartition(".")[2], time.monotonic()
        if not is_no_responders(message):
            try:
                answer = _unguarded.decode(message.data)
            except errors.RequestError as error:
                self._log.error("unguarded_refused", error=str(error))
                return
            self._passing_on.add(token)
            self._num_unanswered.pop(token, None)
            self._unheard_since.pop(token)
            self._reach.answered(token, answer.number, answer.network, lease_time())
            self._apply(token, answer)
            return
        if token == subjects.NO_ROUTER:
            self._passing_on.clear()
            self._say_if_heard()
            return
        if self._reach.no_responders(token, lease_time()):
            self._streams.held.probe_again(self._of(token))
        self._passing_on.discard(token)
        self._say_if_heard()
        if (unheard_since := self._unheard_since.get(token, now)) is None:
            self._unheard_since.put(token, now, now)
            self._streams.held.probe_flowing(self._of(token))
            asyncio.get_running_loop().call_later(_CONFIRM_S, self._check_again, token)
        elif now - unheard_since >= _CONFIRM_S:
            # one whose client is out of reach too keeps its guardian: the link to both may be down
            self._lose(token, [stream for stream in self._of(token) if not self._is_cut_off(stream)])

    def _is_cut_off(self, stream: WorkerStream) -> bool:
        """Whether a link seems to be down between this worker and both a stream's guardian and its client, who can't be
        probed if it is to get only one message."""
        if not self._reach.is_distant(stream.guardian):
            return False
        if not stream.is_streamed:
            return self._reach.is_link_suspect(lease_time())
        return stream.hold is not None and stream.hold.reached_at is None

    def _apply(self, token: str, answer: internal.Unguarded) -> None:
        """Acts on a guardian's answer to a check."""
        missing = set(answer.request_ids)
        lost = []
        for stream in [stream for stream in self._of(token) if stream.key in missing]:
            # one that was held may have moved meanwhile, and ended
            if stream.hold is not None and lease_time() - stream.hold.since >= FENCE_S:
                self._streams.held.disown(stream)
            else:
                lost.append(stream)
        self._lose(token, lost)
        guarded = [stream for stream in (*self._streams, *self._streams.held) if self._is_of(stream, token)]
        doubtful = set(answer.doubtful)
        for stream in guarded if answer.moved or doubtful else ():
            if answer.moved.get(stream.key) == stream.run.attempt:
                self._streams.held.disown(stream)
            elif stream.key in doubtful and stream.hold is not None:
                stream.hold.doubt(lease_time())

    def _is_of(self, stream: WorkerStream, token: str) -> bool:
        return bool(stream.guardian) and token_of(stream.guardian) == token

    def _check_again(self, token: str) -> None:
        for router_id, streams in self._guarded().items():
            if token_of(router_id) == token:
                self._check(router_id, streams)

    def _of(self, token: str) -> Iterator[WorkerStream]:
        """Returns the streams whose guardian has this subject token."""
        return (one for one in self._streams if self._is_of(one, token))

    def _lose(self, token: str, streams: Sequence[WorkerStream]) -> None:
        if not streams:
            return
        self._log.warning("guardian_lost", router_id=streams[0].guardian, streams=len(streams))
        for stream in streams:
            stream.guardian = None
        self._say_if_heard()
        self._offer(time.monotonic())

    def _offer(self, now: float) -> None:
        self._offers.make([stream for stream in self._streams if stream.guardian is None], now)

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
            self._offers.refused(stream)
            return
        stream.guardian = stream.named_guardian = reply.router_id
        self._reach.heard(reply.router_id, lease_time())
        self._passing_on.add(token_of(reply.router_id))
        self._announcer.log.guardians[stream.stream_no] = reply.router_id
        self._announcer.publish_events()
        self._log.info(
            "guardian_changed",
            request_id=stream.key,
            router_id=reply.router_id,
        )
