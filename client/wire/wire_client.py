"""Sends the messages of the wire over one connection: completions, embeddings, ranks, tokens, models and cancels.

The gateway and the command line use it directly; people use `Client`, which is built on it."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar, Unpack

from msgspec import UNSET
from nats.aio.msg import Msg

from tokenbus.client.wire import field_reader
from tokenbus.client.wire.choices import Answers, ChoiceBatch, Choices
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.fleet_viewer import FleetViewer
from tokenbus.client.wire.inbox import Inbox
from tokenbus.client.wire.overload import ask_again
from tokenbus.client.wire.request_fields import GenerateFields
from tokenbus.client.wire.trace_reader import TraceReader, Traces
from tokenbus.client.wire.worker_commands import OperatorCommands, WorkerReply
from tokenbus.protocol.access import keys
from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.shared_answer import SharedAnswer
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.default_model import default_model

AnswerT = TypeVar("AnswerT", bound=messages.Message)
ReplyT = TypeVar(
    "ReplyT",
    messages.EmbedReply,
    messages.RerankReply,
    messages.TokenizeReply,
    messages.DetokenizeReply,
    messages.CacheReply,
)

_ANSWER_S = 1.0
_models = codec.Decoder(messages.ModelsReply)
_embeds = codec.Decoder(messages.EmbedReply)
_tokenizes = codec.Decoder(messages.TokenizeReply)
_detokenizes = codec.Decoder(messages.DetokenizeReply)
_caches = codec.Decoder(messages.CacheReply)
_reranks = codec.Decoder(messages.RerankReply)
_cancels = codec.Decoder(messages.CancelReply)
_PAGE_WORKERS = 256


class WireClient:
    """Open it with `connect`, close it with `close`, or use it as `async with await WireClient.connect() as client`."""

    def __init__(
        self,
        connection: bus.OwnedBus,
        tenant: str,
        prefix: str,
        encoding: codec.Encoding,
        tracer: tracing.Tracer,
        inbox_prefix: str = "",
        key_id: str = "",
    ) -> None:
        self._connection = connection
        self._tenant = tenant
        self._key_id = key_id
        self._names = subjects.Subjects(prefix)
        self._encoding = encoding
        self._tracer = tracer
        self._inbox = Inbox(connection, self._names, tenant, encoding, inbox_prefix)
        self._served = SharedAnswer(functools.partial(self.models, with_workers=False))
        """Models that were served at most a second ago, for requests that name none."""
        self._inboxes = [self._inbox]
        """The inboxes of all tenants that share the connection; the connection's own comes first."""
        self._commands: set[OperatorCommands] = set()

    def __repr__(self) -> str:
        return f"<WireClient of {self._connection!r}, {self.num_streams} streams>"

    @property
    def num_streams(self) -> int:
        """The number of streams that have not ended."""
        return self._inbox.num_streams

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        key_id: str = "",
        prefix: str = subjects.DEFAULT_PREFIX,
        encoding: codec.Encoding = codec.Encoding.JSON,
        connect_timeout_s: float = 10.0,
        settings: nats.BusSettings | None = None,
        tracer: tracing.Tracer | None = None,
    ) -> "WireClient":
        """`settings` hold more about the broker than its address: credentials, TLS, the inbox. `key_id` is that of the
        API key with which they connect: requests name it. If it is not given, and the token or password of the settings
        is a key, it is that key's. `tracer` records a span
        for each stream, as a child of the current one: `opentelemetry.trace.get_tracer(...)` in a traced application.
        Raises ConnectionError when the broker can't be reached."""
        settings = settings or nats.BusSettings(url=url, connect_timeout_s=connect_timeout_s)
        if not key_id and (shown := keys.id_of(settings.secret)):
            key_id = shown
            if settings.inbox_prefix == nats.BusSettings.inbox_prefix:  # which no key may use
                settings = dataclasses.replace(settings, inbox_prefix=keys.inbox_prefix(tenant, key_id))
        connection = await nats.connect(settings, name="tokenbus client")
        return await cls.from_connection(
            connection, tenant=tenant, key_id=key_id, prefix=prefix, encoding=encoding, tracer=tracer
        )

    @classmethod
    async def from_connection(
        cls,
        connection: bus.OwnedBus,
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        key_id: str = "",
        prefix: str = subjects.DEFAULT_PREFIX,
        encoding: codec.Encoding = codec.Encoding.JSON,
        tracer: tracing.Tracer | None = None,
    ) -> "WireClient":
        """Makes a client that uses an existing connection. Closing the client closes the connection."""
        client = cls(connection, tenant, prefix, encoding, tracer or tracing.NoopTracer(), key_id=key_id)
        connection.on_reconnect = client._reconnected
        connection.on_permissions_violation = client._permissions_violated
        await client._inbox.open()
        return client

    async def for_tenant(self, tenant: str, inbox_prefix: str = "") -> "WireClient":
        """Makes a client for another tenant that shares this one's connection. Close only the first one: that ends
        both.

        Its requests use reply subjects that begin with `inbox_prefix`, if given. Only the answer to `cancel` always
        arrives at the connection's own inbox."""
        other = WireClient(self._connection, tenant, self._names.prefix, self._encoding, self._tracer, inbox_prefix)
        await other._inbox.open()
        self._inboxes.append(other._inbox)
        return other

    def with_key(self, key_id: str) -> "WireClient":
        """Returns a client of the same tenant and inbox whose requests name a key; an empty id names none. It costs
        nothing to make, and is not closed."""
        other = copy.copy(self)
        other._key_id = key_id
        other._served = SharedAnswer(functools.partial(other.models, with_workers=False))
        return other

    def end_streams(self, key_id: str, error: errors.Error) -> None:
        """Ends the open streams of this tenant whose requests name a key, with an error, and cancels them."""
        self._inbox.end_streams(key_id, error)

    async def release_tenant(self, other: "WireClient") -> None:
        """Ends a client made by `for_tenant`, once its streams have ended."""
        await other._inbox.wait_idle()
        self._inboxes.remove(other._inbox)
        await other._inbox.close()
        await other._inbox.unsubscribe()

    async def __aenter__(self) -> "WireClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def generate(
        self,
        model: str | None,
        request: messages.GenerateRequest | None = None,
        *,
        headers: tracing.Headers = None,
        resume: bool = True,
        **fields: Unpack[GenerateFields],
    ) -> ChunkStream:
        """Requests a completion and returns its stream at once. Without a model it is for the default one, and its
        stream ends in an error if there is none.

        Pass a request, or the fields of one: `prompt`, `messages`, `token_ids`, `max_tokens`, `temperature` and so on.
        `headers` may name the trace that the request belongs to (`traceparent`). A stream whose worker is lost
        continues at another one; with `resume=False` it ends in `worker_lost` if it has begun. Raises
        RequestError(invalid_request) for an unknown field or one of a wrong type, and ValueError for an invalid model
        name. All other errors end the stream."""
        request = request or field_reader.read(fields, messages.GenerateRequest)
        if request.id is None:
            request = codec.replace(request, id=secrets.token_urlsafe(16))
        if self._encoding is codec.Encoding.MSGPACK:
            request = _packed(request)
        # may raise, so it comes before the span starts
        subject = "" if model is None else self._names.generate(model, self._tenant, self._key_id)
        span = self._begin_span(model, request, headers)
        stream = ChunkStream(request, self._encoding, self._inbox, time.monotonic(), span, subject, resume=resume)
        if model is None:
            self._inbox.submit_when_addressed(stream, self._default_subject)
        else:
            stream.submit()
        return stream

    async def served(self) -> messages.ModelsReply:
        """Returns the models being served, without their workers, as they were at most a second ago. Raises
        RequestError."""
        return await self._served.get()

    async def default_model(self, feature: str) -> str:
        """Returns the only served model that has this feature: the one that a request means if it names none. Raises
        RequestError if there are none or several. What is served is asked at most once a second."""
        served = (await self.served()).models
        return default_model({one.model: one.features for one in served}, feature)

    async def _default_subject(self) -> str:
        return self._names.generate(await self.default_model("generate"), self._tenant, self._key_id)

    def generate_choices(
        self, model: str, requests: Sequence[messages.GenerateRequest], n: int, *, headers: tracing.Headers = None
    ) -> Answers:
        """Requests `n` answers to each request, and returns their streams at once. Raises what `generate` raises."""

        def submit(request: messages.GenerateRequest) -> ChunkStream:
            return self.generate(model, request, headers=headers)

        requests = [one if one.id else codec.replace(one, id=secrets.token_urlsafe(16)) for one in requests]
        return Choices(requests[0], n, submit) if len(requests) == 1 else ChoiceBatch(requests, n, submit)

    async def models(
        self, timeout_s: float = 5.0, *, model: str | None = None, with_workers: bool = True
    ) -> messages.ModelsReply:
        """Returns the models being served, or one of them, with all their workers: as many pages as that takes.

        `timeout_s` is the time for each page. Raises RequestError(no_worker) if no router answers, and what a router
        answers for a model that is not served."""
        asked = messages.ModelsRequest(model=model, limit=None if with_workers else 0)
        whole: messages.ModelsReply | None = None
        while True:
            page = await self.models_page(asked, timeout_s)
            if model is not None:  # routers of earlier versions list the others too
                page = codec.replace(page, models=[one for one in page.models if one.model == model])
            whole = page if whole is None else _joined(whole, page)
            if page.next is UNSET or page.next == asked.after:
                return codec.replace(whole, next=UNSET)
            asked = codec.replace(asked, after=page.next)

    def view_fleet(self) -> FleetViewer:
        """Returns a view of the fleet as it changes, which begins with `async with`. Its digests come in this client's
        encoding; MessagePack takes a third of the space."""
        subject = self._names.fleet_for(self._tenant, self._key_id)
        return FleetViewer(self._connection, subject, f"{self._inbox.prefix}.fleet", self._encoding)

    async def traces(self, asked: messages.TraceRequest) -> Traces:
        """Returns how recent requests of this tenant went, by all routers. Raises RequestError."""
        subject = self._names.trace_for(self._tenant, self._key_id)
        reader = TraceReader(asked)
        return await reader.read(self._connection, subject, f"{self._inbox.prefix}.trace", self._encoding)

    async def models_page(self, asked: messages.ModelsRequest, timeout_s: float = 5.0) -> messages.ModelsReply:
        """Returns a page of the models being served; a router of an earlier version returns everything that fits into
        a message. Asks again if the router is asked too much. Raises RequestError."""
        return await ask_again(lambda: self._models_page(asked, timeout_s), timeout_s)

    async def _models_page(self, asked: messages.ModelsRequest, timeout_s: float) -> messages.ModelsReply:
        if asked.model is None and asked.after is None and asked.limit is None:
            asked = codec.replace(asked, limit=_PAGE_WORKERS)
        subject = self._names.models_for(self._tenant, self._key_id)
        page = self._read(_models, await self._request(subject, codec.encode(asked, self._encoding), timeout_s))
        if page.error is not UNSET:
            raise errors.RequestError(page.error)
        return page

    async def embed(self, model: str, request: messages.EmbedRequest) -> messages.EmbedReply:
        """Returns the embeddings of a request's inputs. Raises RequestError on failure.

        Waits a little longer than the request's `timeout_ms`, as the calls below do. They raise ValueError for an
        invalid model name."""
        return await self._ask_under_id(self._names.embed(model, self._tenant, self._key_id), request, _embeds)

    async def rerank(self, model: str, request: messages.RerankRequest) -> messages.RerankReply:
        """Returns a request's documents ordered by relevance. Raises RequestError on failure."""
        return await self._ask_under_id(self._names.rerank(model, self._tenant, self._key_id), request, _reranks)

    async def tokenize(self, model: str, request: messages.TokenizeRequest) -> messages.TokenizeReply:
        """Returns the tokens of a prompt, or only their number. Raises RequestError on failure."""
        timeout_s = _timeout_s(request.timeout_ms)
        reply = await self._ask_once(
            self._names.tokenize(model, self._tenant, self._key_id), request, _tokenizes, timeout_s
        )
        if request.continue_final_message and reply.continues is not True:
            raise errors.unsupported_field(validation.CONTINUE, "the routers are of an earlier version")
        return reply

    async def keep_session(self, model: str, session_id: str, ttl_s: float = 300.0) -> None:
        """Asks the model's workers to keep the cached blocks of one of this tenant's sessions for that long. This is a
        hint: its effect is not reported. Raises RequestError if it could not be passed on."""
        await self._hint(model, session_id, ttl_s)

    async def end_session(self, model: str, session_id: str) -> None:
        """Says that one of this tenant's sessions has ended: cached blocks that only it has used are evicted first.
        Raises RequestError if the hint could not be passed on."""
        await self._hint(model, session_id, 0.0)

    async def _hint(self, model: str, session_id: str, ttl_s: float) -> None:
        control = messages.CacheControl(ttl_ms=1e3 * ttl_s)
        request = messages.CacheRequest(session_id=session_id, cache_control=control)
        await self._ask_once(self._names.cache(model, self._tenant, self._key_id), request, _caches, _ANSWER_S)

    async def detokenize(self, model: str, request: messages.DetokenizeRequest) -> messages.DetokenizeReply:
        """Returns the text of tokens. Raises RequestError on failure."""
        timeout_s = _timeout_s(request.timeout_ms)
        return await self._ask_once(
            self._names.detokenize(model, self._tenant, self._key_id), request, _detokenizes, timeout_s
        )

    async def _ask_under_id(
        self,
        subject: str,
        request: messages.EmbedRequest | messages.RerankRequest,
        decoder: codec.Decoder[ReplyT],
    ) -> ReplyT:
        """Asks for what takes long: the request is cancelled if the caller is."""
        request_id = request.id or secrets.token_urlsafe(16)
        request = codec.replace(request, id=request_id)
        try:
            return await self._ask_once(subject, request, decoder, _timeout_s(request.timeout_ms))
        except asyncio.CancelledError:
            with contextlib.suppress(bus.OutboundBufferLimitError, ConnectionError):
                self._connection.publish(self._names.cancel(request_id, self._tenant), b"")
            raise

    async def _ask_once(
        self, subject: str, request: messages.Message, decoder: codec.Decoder[ReplyT], timeout_s: float
    ) -> ReplyT:
        reply = self._read(decoder, await self._request(subject, codec.encode(request, self._encoding), timeout_s))
        if reply.error:
            raise errors.RequestError(reply.error)
        return reply

    async def cancel(self, request_id: str, timeout_s: float = 2.0) -> bool:
        """Cancels any request of this tenant. Returns False if no process holds a request with that id."""
        try:
            subject, headers = self._names.cancel(request_id, self._tenant), codec.content_headers(self._encoding)
            answer = await self._inbox.request(bus.Outgoing(subject, b"", headers=headers), timeout_s)
        except (bus.NoRespondersError, TimeoutError):
            return False
        return self._read(_cancels, answer).cancelled

    async def command_workers(
        self, workers: Sequence[subjects.WorkerAddress], control: internal.Control, inbox_prefix: str = ""
    ) -> AsyncGenerator[WorkerReply, None]:
        """Sends an operator's command to workers; yields their replies until each has given its last one, or an error
        in its place. Workers record who commands them by the prefix of the inbox, which is this client's own unless
        another is given. Close the iterator if it is left early. Raises ConnectionError."""
        inbox = f"{inbox_prefix or self._inbox.prefix}.{secrets.token_hex(8)}"
        commands = OperatorCommands(self._connection, self._names, inbox, workers, control)
        self._commands.add(commands)
        try:
            async with contextlib.aclosing(commands.replies()) as replies:
                async for one in replies:
                    yield one
        finally:
            self._commands.discard(commands)

    async def close(self) -> None:
        """Cancels all running requests and disconnects."""
        for inbox in reversed(self._inboxes):
            await inbox.close()
        await self._connection.close()

    def _reconnected(self) -> None:
        for inbox in self._inboxes:
            inbox.reconnected()

    def _permissions_violated(self, words: str) -> None:
        for inbox in self._inboxes:
            inbox.permissions_violated(words)
        for commands in self._commands:
            commands.permissions_violated(words)

    def _begin_span(
        self, model: str | None, request: messages.GenerateRequest, headers: tracing.Headers
    ) -> tracing.Span:
        operation = "chat" if request.messages else "text_completion"
        known = {
            tracing.OPERATION: operation,
            tracing.MODEL: model,
            tracing.REQUEST_ID: request.id,
            tracing.TENANT: self._tenant,
            tracing.KEY_ID: self._key_id or None,
            "gen_ai.provider.name": "tokenbus",
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.stream": request.stream is not False,
        }
        return tracing.start_span(self._tracer, f"{operation} {model or ''}".rstrip(), "client", headers, known)

    async def _request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        message = bus.Outgoing(subject, payload, headers=codec.content_headers(self._encoding))
        try:
            return await self._inbox.request(message, timeout_s)
        except bus.NoRespondersError as error:
            raise errors.request_error(errors.Code.NO_WORKER, "no router listens on this broker") from error
        except bus.PayloadTooLargeError as error:
            raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)) from error
        except (TimeoutError, ConnectionError, bus.OutboundBufferLimitError) as error:
            raise errors.request_error(errors.Code.NO_WORKER, str(error)) from error

    def _read(self, decoder: codec.Decoder[AnswerT], answer: Msg) -> AnswerT:
        """Decodes an answer. Raises RequestError(internal) if it is malformed, which is not the caller's fault."""
        try:
            return decoder.decode(answer.data, self._encoding)
        except errors.RequestError as error:
            text = f"the answer can't be read: {error.error.message}"
            raise errors.request_error(errors.Code.INTERNAL, text) from error


def _timeout_s(timeout_ms: float | None) -> float:
    """Returns the time after which a router that has not answered must be gone."""
    return (limits.DEFAULT_CALL_TIMEOUT_MS if timeout_ms is None else timeout_ms) / 1e3 + _ANSWER_S


def _joined(whole: messages.ModelsReply, page: messages.ModelsReply) -> messages.ModelsReply:
    """Returns a listing with the models and workers of its next page, each worker once."""
    models = {one.model: one for one in whole.models}
    for more in page.models:
        known = models.setdefault(more.model, more)
        if known is not more and more.workers is not UNSET:
            cards = {card.worker_id: card for card in (*(known.workers or []), *more.workers)}
            models[more.model] = codec.replace(known, workers=list(cards.values()))
    return codec.replace(whole, models=list(models.values()))


def _packed(request: messages.GenerateRequest) -> messages.GenerateRequest:
    """Packs a list of token ids; one that can't be packed is left for the router to refuse."""
    if isinstance(request.token_ids, list):
        with contextlib.suppress(OverflowError, TypeError):
            return codec.replace(request, token_ids=block_hash.pack_token_ids(request.token_ids))
    return request
