"""Takes what clients publish: drops what may not be answered, refuses what is wrong, sends the rest on its way."""

import asyncio
import secrets
import time
from collections.abc import Callable

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, Subscription
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.wire import codec, embeddings, errors, messages, subjects, validation
from tokenbus.router.models import Models
from tokenbus.router.requests.embeddings import Asked, Embeddings
from tokenbus.router.requests.flight import Flight
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.terminals import TerminalPublisher

_requests = codec.Decoder(messages.GenerateRequest)
_resyncs = codec.Decoder(messages.ResyncRequest)
_embeds = codec.Decoder(messages.EmbedRequest)
_TWIN_S = 0.05
"""How long a request waits for the end of another with its id: the client may know of that before this router does."""
_MAX_TWINS = 256
MAX_LOGGED_DROPS = 100
"""Dropped messages that get a line of their own in the log; the rest are only counted."""


class Intake:
    """The public subjects of one router."""

    def __init__(
        self,
        connection: Bus,
        replies: ReplySender,
        names: subjects.Subjects,
        inbox_prefixes: tuple[str, ...],
        max_request_bytes: int,
        models: Models,
        lifecycle: RequestLifecycle,
        embeddings: Embeddings,
        terminals: TerminalPublisher,
    ) -> None:
        self._connection = connection
        self._replies = replies
        self._names = names
        self._inbox_prefixes = inbox_prefixes
        self._max_request_bytes = max_request_bytes
        self._shown = models
        self._lifecycle = lifecycle
        self._embeddings = embeddings
        self._terminals = terminals
        self._subscriptions: list[Subscription] = []
        self._twins: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        """Requests whose id is in flight, and what tries once more to take them."""
        self._log = structlog.get_logger()
        self.is_open = False
        """Whether it takes requests."""
        self.num_dropped = 0
        """Messages that may not be answered: their reply subject is no inbox."""

    def __repr__(self) -> str:
        return f"<Intake {self._lifecycle!r}, {self.num_dropped} dropped>"

    async def open(self) -> None:
        """Subscribes to everything that clients publish."""
        shared = [
            *((subject, self._generate) for subject in self._names.all_generates),
            *((subject, self._embed) for subject in self._names.all_embeds),
            *((subject, self._models) for subject in self._names.models),
        ]
        for subject, callback in shared:
            self._subscriptions.append(await self._connection.subscribe(subject, callback, queue="router"))
        for subject in self._names.all_cancels:
            await self._connection.subscribe(subject, self._cancel)
        for subject in self._names.all_resyncs:
            await self._connection.subscribe(subject, self._resync)
        self.is_open = True

    async def close(self) -> None:
        """Takes nothing new: other routers get what is published from now on."""
        self.is_open = False
        for subscription in self._subscriptions:
            await self._connection.unsubscribe(subscription)
        for timer, try_again in list(self._twins.items()):
            timer.cancel()
            try_again()

    def _generate(self, message: Msg) -> None:
        if not self._may_answer(message):
            return
        try:
            encoding = codec.encoding_of(message.headers)
        except codec.MediaTypeError as error:
            self._refuse(message, codec.Encoding.JSON, "", errors.make_error(errors.Code.INVALID_REQUEST, str(error)))
            return
        request_id = ""
        try:
            address = self._address(message)
            self._check_size(message)
            request = _requests.decode(message.data, encoding)
            validation.check_id(request.id)
            request_id = request.id or ""
            validation.check_request(request)
            self._lifecycle.check(request.routing)
            self._take(request, address, message, encoding)
        except errors.RequestError as error:
            self._refuse(message, encoding, request_id or _readable_id(message, encoding), error.error)

    def _take(
        self,
        request: messages.GenerateRequest,
        address: subjects.ModelAddress,
        message: Msg,
        encoding: codec.Encoding,
    ) -> None:
        """Makes a flight of a checked request. Raises RequestError."""
        if request.id is None:
            request = codec.replace(request, id=secrets.token_urlsafe(16))
        flight = Flight(request, address, message.reply, encoding, time.monotonic())
        try:
            self._lifecycle.begin(flight, len(message.data), message.headers)
        except errors.RequestError as error:
            if error.error.code is not errors.Code.DUPLICATE_REQUEST or len(self._twins) >= _MAX_TWINS:
                raise
            self._take_later(flight, message)

    def _take_later(self, flight: Flight, message: Msg) -> None:
        """Once more, when the other with its id has had time to end."""

        def try_again() -> None:
            del self._twins[timer]
            try:
                self._lifecycle.begin(flight, len(message.data), message.headers)
            except errors.RequestError as error:
                self._refuse(message, flight.encoding, flight.request_id, error.error)

        timer = asyncio.get_running_loop().call_later(_TWIN_S, try_again)
        self._twins[timer] = try_again

    def _embed(self, message: Msg) -> None:
        if not self._may_answer(message):
            return
        request_id = ""
        encoding = codec.Encoding.JSON
        try:
            encoding = codec.encoding_of(message.headers)
            self._check_size(message)
            request = _embeds.decode(message.data, encoding)
            validation.check_id(request.id)
            request_id = request.id or secrets.token_urlsafe(16)
            address, work = self._address(message), embeddings.check_request(request)
            asked = Asked(request_id, address, request, work, message.reply, encoding, time.monotonic())
            self._embeddings.begin(asked, message.headers)
            return
        except codec.MediaTypeError as problem:
            error = errors.make_error(errors.Code.INVALID_REQUEST, str(problem))
        except errors.RequestError as problem:
            error = problem.error
            request_id = request_id or _readable_id(message, encoding)
        self._log.info("embed_refused", request_id=request_id, code=error.code, param=error.param)
        self._embeddings.answer(message.reply, encoding, messages.EmbedReply(id=request_id, error=error))

    def _models(self, message: Msg) -> None:
        if not self._may_answer(message):
            return
        try:
            encoding = codec.encoding_of(message.headers)
        except codec.MediaTypeError:
            encoding = codec.Encoding.JSON
        self._replies.send(message.reply, self._shown.answer(encoding, self._connection.max_payload))

    def _cancel(self, message: Msg) -> None:
        if message.reply and not self._may_answer(message):
            return
        try:
            address = self._names.parse_request(message.subject)
            encoding = codec.encoding_of(message.headers)
        except ValueError:
            return
        if self._lifecycle.cancel(address.key) and message.reply:
            self._replies.send(message.reply, codec.encode(messages.CancelReply(cancelled=True), encoding))

    def _resync(self, message: Msg) -> None:
        if not self._may_answer(message):
            return
        try:
            address = self._names.parse_request(message.subject)
            if not self._lifecycle.knows(address.key):
                return
            encoding = codec.encoding_of(message.headers)
            _resyncs.decode(message.data, encoding)
        except (ValueError, errors.RequestError):
            return
        if self._lifecycle.repeat(address.key):
            self._replies.send(message.reply, codec.encode(messages.ResyncReply(found=True), encoding))

    def _may_answer(self, message: Msg) -> bool:
        tenant = self._names.tenant_token(message.subject)
        if subjects.is_inbox(message.reply, self._inbox_prefixes, tenant):
            return True
        self.num_dropped += 1
        if self.num_dropped <= MAX_LOGGED_DROPS:
            self._log.warning("reply_subject_refused", subject=message.subject, reply=message.reply[:200])
        return False

    def _address(self, message: Msg) -> subjects.ModelAddress:
        try:
            return self._names.parse_model(message.subject)
        except ValueError as error:
            raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="model") from error

    def _check_size(self, message: Msg) -> None:
        if len(message.data) > self._max_request_bytes:
            raise errors.request_error(
                errors.Code.PAYLOAD_TOO_LARGE,
                f"the message has {len(message.data)} bytes, at most {self._max_request_bytes} are taken",
            )

    def _refuse(self, message: Msg, encoding: codec.Encoding, request_id: str, error: errors.Error) -> None:
        key = f"{self._names.tenant_token(message.subject)}:{request_id}"
        self._terminals.refuse(message.reply, encoding, request_id, key, error)


def _readable_id(message: Msg, encoding: codec.Encoding) -> str:
    """The id of a request that is wrong in some other way; empty where there is none to be read."""
    try:
        request_id = _ids.decode(message.data, encoding).id
        validation.check_id(request_id)
    except errors.RequestError:
        return ""
    return request_id or ""


class _OnlyId(msgspec.Struct, frozen=True):
    id: str | None = None


_ids = codec.Decoder(_OnlyId)
