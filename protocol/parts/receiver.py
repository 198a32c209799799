"""Receives large messages: answers announcements and parts, and passes on each complete message."""

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, Callback, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.parts import assembly as parts
from tokenbus.protocol.parts.assembly import Upload, UploadLimits, Uploads
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, messages

Outcome = Callable[[str], None]
"""Called with `complete`, `expired`, `given_up` or `failed` for each upload that ends."""


class _Announced:
    """An announced message, as far as it is known."""

    def __init__(self, message: Msg, encoding: codec.Encoding, on_complete: Callback) -> None:
        self.subject = message.subject
        # nothing else is read of a whole message, and other headers could take as much memory as its parts
        self.headers = tracing.trace_headers(message.headers) | (codec.content_headers(encoding) or {})
        self.encoding = encoding
        self.on_complete = on_complete


class PartsReceiver:
    """Receives a process's large messages, or those of one kind."""

    def __init__(
        self,
        bus: Bus,
        to_subject: Callable[[str, str], str],
        bounds: UploadLimits,
        may_answer: Callable[[Msg], bool],
        *,
        is_public: bool = False,
        on_ended: Outcome = lambda outcome: None,
    ) -> None:
        """`to_subject` makes the subject for an upload's parts from its owner and id, or the pattern matching all from
        two asterisks. Parts are answered only if `may_answer`. Public messages use the encoding named in their header,
        and errors reach clients in a terminal."""
        self._bus = bus
        self._to_subject = to_subject
        self._uploads: Uploads[_Announced] = Uploads(bounds)
        self._may_answer = may_answer
        self._is_public = is_public
        self._on_ended = on_ended
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<PartsReceiver {self._uploads!r}>"

    @property
    def num_uploads(self) -> int:
        """The number of large messages in transit."""
        return len(self._uploads)

    @property
    def held_bytes(self) -> int:
        """Bytes of their parts that are held."""
        return self._uploads.held_bytes

    async def open(self, incoming: Bus | None = None) -> None:
        """Subscribes to the parts of all uploads, over `incoming` if that is given."""
        await (incoming or self._bus).subscribe(self._to_subject("*", "*"), self._on_part)

    def stop(self) -> None:
        """Takes no more messages; incomplete ones are refused as lost, so that they are sent again."""
        self._is_stopped = True
        for _ in self._uploads.clear():
            self._on_ended("failed")
        if self._timer is not None:
            self._timer.cancel()

    def announced(self, message: Msg, owner: str, on_complete: Callback) -> bool:
        """Returns False for a message that is not an announcement. Otherwise tells its sender where to send the parts,
        and later calls `on_complete` with the whole message, whose reply subject is the last part's.

        Raises MediaTypeError, and RequestError if the message can't be accepted."""
        if not parts.is_announcement(message.headers):
            return False
        now = time.monotonic()
        self._expire(now)
        if self._is_stopped:
            raise errors.request_error(errors.Code.SHUTTING_DOWN)
        announced = _Announced(message, self._encoding_of(message), on_complete)
        subject = self._to_subject(owner, secrets.token_hex(16))
        self._uploads.announce(subject, owner, parts.size_of(message.headers), announced, now)
        self._start_timer()
        self._answer(message, announced.encoding, messages.UploadReply(upload=subject))
        return True

    async def whole(self, reply: Msg, owner: str, timeout_s: float) -> Msg:
        """Returns the reply to a request, or the large message that it announces. Raises TimeoutError, RequestError."""
        if not parts.is_announcement(reply.headers):
            return reply
        complete: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def resolve(message: Msg) -> None:
            if not complete.done():
                complete.set_result(message)

        self.announced(reply, owner, resolve)
        async with asyncio.timeout(timeout_s):
            return await complete

    def _on_part(self, message: Msg) -> None:
        if not message.data:
            if self._uploads.remove(message.subject) is not None:
                self._on_ended("given_up")
            return
        num_known = len(self._uploads)
        try:
            upload = self._uploads.add(
                message.subject, parts.offset_of(message.headers), message.data, time.monotonic()
            )
        except errors.RequestError as error:
            if len(self._uploads) < num_known:
                self._on_ended("failed")
                self._log.warning("upload_failed", code=error.error.code, error=error.error.message)
            self._refuse(message, error.error)
            return
        if upload is None:
            return  # its message is being answered
        if upload.is_complete:
            self._on_ended("complete")
            upload.context.on_complete(_to_message(message, upload))
        else:
            answer = messages.UploadReply(upload=upload.subject, received=len(upload.data))
            self._answer(message, upload.context.encoding, answer)

    def _refuse(self, message: Msg, error: errors.Error) -> None:
        if not self._is_public:
            self._answer(message, codec.Encoding.MSGPACK, messages.UploadReply(error=error))
            return
        try:
            encoding = codec.encoding_of(message.headers)
        except codec.MediaTypeError:
            encoding = codec.Encoding.JSON
        terminal = messages.Chunk(id="", finish_reason=messages.FinishReason.ERROR, error=error)
        self._answer(message, encoding, terminal, codec.error_headers(error))

    def _encoding_of(self, message: Msg) -> codec.Encoding:
        return codec.encoding_of(message.headers) if self._is_public else codec.Encoding.MSGPACK

    def _answer(
        self, message: Msg, encoding: codec.Encoding, answer: codec.Message, headers: dict[str, str] | None = None
    ) -> None:
        """Answers a sender, which repeats the part if no answer arrives."""
        if message.reply and self._may_answer(message):
            try:
                self._bus.publish(message.reply, codec.encode(answer, encoding), headers=headers)
            except (OutboundBufferLimitError, PayloadTooLargeError, ConnectionError) as error:
                self._log.warning("reply_not_sent", subject=message.reply, error=str(error))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._expire(time.monotonic())
        if self._uploads:
            self._start_timer()

    def _expire(self, now: float) -> None:
        for upload in self._uploads.expire(now):
            self._on_ended("expired")
            self._log.warning("upload_expired", owner=upload.owner, received=len(upload.data), size=upload.size)


def _to_message(last: Msg, upload: Upload[_Announced]) -> Msg:
    announced = upload.context
    return Msg(last._client, announced.subject, last.reply, bytes(upload.data), announced.headers or None)
