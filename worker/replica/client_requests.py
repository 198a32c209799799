"""Answers clients' cancels and resyncs of this worker's streams, whichever way they come.

Routers pass them on to the worker that has the stream. Only while that may not reach this worker (`listen`) does it
hear what clients of its model publish: most of that is for other workers, and each of them hears all of it."""

import time

from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, Subscription
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, internal, limits, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.streams.streams import Streams

_LISTENS_ON_S = 5.0
"""It stops hearing clients this long after that was last necessary: a guardian that answers late may do so again."""
_MAX_ANSWERED = 4_096


class ClientRequests:
    """The cancels and resyncs of one worker's streams."""

    def __init__(
        self, replies: ReplySender, names: subjects.Subjects, model: str, streams: Streams, prefixes: tuple[str, ...]
    ) -> None:
        """`prefixes` are those of allowed inboxes."""
        self._replies = replies
        self._names = names
        self._model = model
        self._streams = streams
        self._inbox_prefixes = prefixes
        self._incoming: Bus | None = None
        self._subscriptions: list[Subscription] = []
        self._listen_until = 0.0
        self._changing = False
        self._answered: TTLCache[bool] = TTLCache(limits.REPLAY_INTERVAL_S, _MAX_ANSWERED)
        """Reply subjects that were just answered: several routers pass on the same message."""

    def __repr__(self) -> str:
        return f"<ClientRequests of {self._model}{', listening' if self._subscriptions else ''}>"

    @property
    def is_listening(self) -> bool:
        """Whether it hears all clients of its model."""
        return bool(self._subscriptions)

    def open(self, incoming: Bus) -> None:
        """Takes the connection over which it is to hear clients."""
        self._incoming = incoming

    def listen(self, *, wanted: bool) -> None:
        """Says whether cancels and resyncs may come in no other way; to be said again a few times a second."""
        now = time.monotonic()
        if wanted:
            self._listen_until = now + _LISTENS_ON_S
        if (now < self._listen_until) is not self.is_listening and not self._changing and self._incoming is not None:
            self._changing = True
            tasks.background("hear clients", self._change(self._incoming, starts=not self.is_listening))

    async def _change(self, incoming: Bus, *, starts: bool) -> None:
        try:
            if starts:
                self._subscriptions.append(await incoming.subscribe(self._names.cancels_of(self._model), self._cancel))
                self._subscriptions.append(await incoming.subscribe(self._names.resyncs_of(self._model), self._resync))
            while self._subscriptions and not starts:
                await incoming.unsubscribe(self._subscriptions.pop())
        finally:
            self._changing = False

    def take(self, message: Msg, control: internal.Control) -> None:
        """Takes what a router has passed on, or asks for itself: to repeat the end of a stream, without an answer."""
        assert control.request_id is not None
        headers = None if control.content_type is None else {codec.CONTENT_TYPE: control.content_type}
        if control.op == "cancel":
            self.cancel(control.request_id, message.reply, headers)
        elif message.reply:
            self.resync(control.request_id, message.reply, headers, control.body)
        else:
            _, asked, error = validation.read_resync(headers, control.body)
            if error is None:
                self._streams.held.repeat_end(control.request_id, asked.offset)

    def _cancel(self, message: Msg) -> None:
        if (key := self._key(message)) is not None:
            self.cancel(key, message.reply, message.headers)

    def _resync(self, message: Msg) -> None:
        if (key := self._key(message)) is not None:
            self.resync(key, message.reply, message.headers, message.data)

    def _key(self, message: Msg) -> str | None:
        try:
            return self._names.parse_request(message.subject).key
        except ValueError:
            return None

    def cancel(self, key: str, reply: str, headers: dict[str, str] | None) -> None:
        """Cancels a stream, and answers if there is a reply subject and this worker has the stream."""
        if reply and not self._is_inbox(reply, key):
            return  # the routers count and log it
        try:
            encoding = codec.encoding_of(headers)
        except codec.MediaTypeError:
            return
        if self._streams.cancel(key) and reply:
            self._answer(reply, codec.encode(messages.CancelReply(cancelled=True), encoding))

    def resync(self, key: str, reply: str, headers: dict[str, str] | None, body: bytes) -> None:
        """Publishes a stream again as asked, and answers if this worker has the stream."""
        # before decoding: what clients publish mostly concerns another worker's stream
        if not self._is_inbox(reply, key) or not self._streams.holds(key):
            return
        encoding, asked, error = validation.read_resync(headers, body)
        if error is None:
            self._streams.replay(key, asked.offset, asked.prompt_offset)
        self._answer(reply, codec.encode(messages.ResyncReply(found=True, error=error), encoding))

    def _answer(self, reply: str, payload: bytes) -> None:
        now = time.monotonic()
        if self._answered.get(reply, now) is None:
            self._answered.put(reply, True, now)
            self._replies.send(reply, payload)

    def _is_inbox(self, reply: str, key: str) -> bool:
        return subjects.is_inbox(reply, self._inbox_prefixes, key.partition(":")[0])
