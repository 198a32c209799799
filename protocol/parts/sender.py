"""Sends large messages: announces each one, then sends its parts one at a time, each after the previous one is
answered."""

import asyncio
import contextlib

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, NoRespondersError, OutboundBufferLimitError, Outgoing
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts import assembly as parts
from tokenbus.protocol.wire import codec, errors, limits, messages

_answers = codec.Decoder(messages.UploadReply)
_MAX_IN_TURN = 4
"""Parts of different messages in flight at a time: other traffic on the connection waits for no more than these."""
_TURN_S = 1.0
"""A part unanswered for this long no longer holds up others."""


class PartsSender:
    """Sends the large messages of one connection."""

    def __init__(
        self,
        connection: Bus,
        replies: ReplyInbox,
        encoding: codec.Encoding = codec.Encoding.MSGPACK,
        *,
        timeout_s: float = 5.0,
        tries: int = 3,
    ) -> None:
        """The answers to parts arrive in `replies`. A part not answered in time is sent again, up to `tries` times in
        all."""
        self._connection = connection
        self._replies = replies
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._tries = tries
        self._turns = asyncio.Semaphore(_MAX_IN_TURN)

    def __repr__(self) -> str:
        return f"<PartsSender {self._replies!r}>"

    def fits(self, payload: bytes) -> bool:
        """Whether a message needs no parts."""
        return len(payload) + limits.MESSAGE_RESERVE_BYTES <= self._connection.max_payload

    async def stage(self, message: Outgoing) -> Outgoing:
        """Sends all parts of a large message but the last, and returns that one, to be published or requested like the
        message itself: only then does the receiver have the message. A message that fits is returned unchanged.

        Raises NoRespondersError if there is no receiver, RequestError if it is refused (upload_lost if the receiver is
        lost midway), and TimeoutError and ConnectionError before that."""
        if self.fits(message.payload):
            return message
        size, step = len(message.payload), parts.part_bytes(self._connection.max_payload)
        headers = (message.headers or {}) | {parts.SIZE: str(size)}
        subject = await self._ask(message.subject, b"", headers)
        try:
            at = 0
            while at + step < size:
                part = message.payload[at : at + step]
                await self._ask(subject, part, self._part_headers(at))
                at += step
        except (NoRespondersError, TimeoutError) as error:
            raise errors.request_error(errors.Code.UPLOAD_LOST, f"the receiver is gone: {error}") from error
        except BaseException:
            with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
                self._connection.publish(subject, b"")
            raise
        return Outgoing(subject, message.payload[at:], message.reply, self._part_headers(at))

    def _part_headers(self, offset: int) -> dict[str, str]:
        return {parts.OFFSET: str(offset)} | (codec.content_headers(self._encoding) or {})

    async def _ask(self, subject: str, payload: bytes, headers: dict[str, str]) -> str:
        """Sends an announcement or a part, retrying if no answer arrives, and returns the subject for further parts."""
        await self._replies.open()
        for _ in range(self._tries):
            try:
                return self._read(await self._ask_once(subject, payload, headers))
            except TimeoutError:
                continue
        raise TimeoutError(f"no answer on {subject} in {self._tries} times {self._timeout_s} s")

    async def _ask_once(self, subject: str, payload: bytes, headers: dict[str, str]) -> Msg:
        async with self._turns:
            answered = self._replies.request(Outgoing(subject, payload, headers=headers), self._timeout_s)
            try:
                await asyncio.wait([answered], timeout=_TURN_S)
            except asyncio.CancelledError:
                answered.cancel()  # `wait` leaves it alone, and its error would be nobody's
                raise
        return await answered

    def _read(self, answer: Msg) -> str:
        """Returns the subject in an answer. Raises RequestError for a refusal, and for a receiver that does not support
        messages in parts."""
        try:
            read = _answers.decode(answer.data, self._encoding)
        except errors.RequestError:
            read = messages.UploadReply()
        if read.upload is not None:
            return read.upload
        # receivers that do not support announcements find them malformed
        if read.error is None or read.error.code is errors.Code.INVALID_REQUEST:
            text = "the message is larger than the broker allows, and its receiver takes none in parts"
            raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, text)
        raise errors.RequestError(read.error)
