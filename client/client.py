"""A connection to a Tokenbus system, and the requests that can be made over it."""

import asyncio
import contextlib
import secrets
import time
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg

from tokenbus.client.stream import Stream
from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, messages, subjects

AnswerT = TypeVar("AnswerT", bound=messages.Message)

_models = codec.Decoder(messages.ModelsReply)
_embeds = codec.Decoder(messages.EmbedReply)
_chunks = codec.Decoder(messages.Chunk)
_cancels = codec.Decoder(messages.CancelReply)

_TICK_S = 0.1
_MAX_PAUSE_S = 0.5
"""A client that was held up for longer has heard nothing meanwhile, so that silence proves nothing."""
_RESYNC = "-resync"
"""On a reply subject: the answer to a resync of the stream in that place."""
_MAX_ORPHANS = 1_024


class Client:
    """Open it with `connect`, close it with `close`, or use it as `async with await Client.connect(url) as client`."""

    def __init__(
        self,
        connection: bus.Bus,
        tenant: str,
        prefix: str,
        encoding: codec.Encoding,
        tracer: tracing.Tracer,
        inbox: str = "",
    ) -> None:
        self._connection = connection
        self._tenant = tenant
        self._names = subjects.Subjects(prefix)
        self._encoding = encoding
        self._tracer = tracer
        self._inbox = inbox or connection.new_inbox()
        self._streams: dict[str, Stream] = {}
        self._reply_tokens: dict[Stream, str] = {}
        self._orphans: TTLCache[bool] = TTLCache(ttl_s=10.0, capacity=_MAX_ORPHANS)
        self._ticker: asyncio.Task[None] | None = None
        self._inbox_error: errors.Error | None = None
        """Why nothing that is asked can be heard."""
        self._tenant_clients: list[Client] = []

    def __repr__(self) -> str:
        return f"<Client of {self._connection!r}, {len(self._streams)} streams>"

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        prefix: str = subjects.DEFAULT_PREFIX,
        encoding: codec.Encoding = codec.Encoding.JSON,
        connect_timeout_s: float = 10.0,
        settings: nats.Settings | None = None,
        tracer: tracing.Tracer | None = None,
    ) -> "Client":
        """`settings` say more of the broker than its address: credentials, TLS, the inbox. `tracer` makes a span of
        each stream, below the current span: `opentelemetry.trace.get_tracer(...)` in an application that is traced.
        Raises ConnectionError when the broker can't be reached."""
        settings = settings or nats.Settings(url=url, connect_timeout_s=connect_timeout_s)
        connection = await nats.connect(settings, name="tokenbus client")
        return await cls.from_connection(connection, tenant=tenant, prefix=prefix, encoding=encoding, tracer=tracer)

    @classmethod
    async def from_connection(
        cls,
        connection: bus.Bus,
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        prefix: str = subjects.DEFAULT_PREFIX,
        encoding: codec.Encoding = codec.Encoding.JSON,
        tracer: tracing.Tracer | None = None,
    ) -> "Client":
        """A client over a connection that is there already; closing the client closes it."""
        client = cls(connection, tenant, prefix, encoding, tracer or tracing.NoopTracer())
        connection.on_reconnect = client._reconnected
        connection.on_permissions_violation = client._permissions_violated
        await client._open()
        return client

    async def for_tenant(self, tenant: str, inbox_prefix: str = "") -> "Client":
        """A client on behalf of another tenant over this one's connection. Close only the first: that ends both.

        Its streams come to an inbox that begins with `inbox_prefix`, or else as the connection's own do; answers to its
        `models`, `embed` and `cancel` come to the connection's own in any case."""
        inbox = f"{inbox_prefix}.{secrets.token_hex(8)}" if inbox_prefix else ""
        other = Client(self._connection, tenant, self._names.prefix, self._encoding, self._tracer, inbox)
        await other._open()
        self._tenant_clients.append(other)
        return other

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def generate(
        self,
        model: str,
        request: messages.GenerateRequest | None = None,
        *,
        headers: tracing.Headers = None,
        **fields: Any,
    ) -> Stream:
        """Asks for a completion and returns its stream at once.

        `fields` are those of GenerateRequest: `prompt`, `messages`, `token_ids`, `max_tokens`, `temperature` and so on.
        `headers` may say which trace the request belongs to (`traceparent`).
        Raises RequestError(invalid_request) for a field of a wrong type, and ValueError for a model that can't be a
        name; all else is answered in the stream."""
        request = request or _request_of(fields)
        if request.id is None:
            request = codec.replace(request, id=secrets.token_urlsafe(16))
        subject = self._names.generate(model, self._tenant)  # raises what it has to before there is a span
        span = self._begin_span(model, request, headers)
        stream = Stream(request, self._encoding, _Transport(self, subject), time.monotonic(), span)
        self._send(stream, subject, request)
        return stream

    async def models(self, timeout_s: float = 5.0) -> messages.ModelsReply:
        """What is being served. Raises RequestError(no_worker) when no router answers."""
        answer = await self._ask(self._names.models_for(self._tenant), b"", timeout_s)
        return self._read(_models, answer)

    async def embed(self, model: str, request: messages.EmbedRequest, timeout_s: float = 60.0) -> messages.EmbedReply:
        """The embeddings of a request's inputs. Raises RequestError when there are none."""
        subject = self._names.embed(model, self._tenant)
        answer = await self._ask(subject, codec.encode(request, self._encoding), timeout_s)
        reply = self._read(_embeds, answer)
        if reply.error:
            raise errors.RequestError(reply.error)
        return reply

    async def cancel(self, request_id: str, timeout_s: float = 2.0) -> bool:
        """Cancels any request of this tenant; False when nobody holds one with that id."""
        try:
            answer = await self._connection.request(
                self._names.cancel(request_id, self._tenant),
                b"",
                timeout_s,
                headers=codec.content_headers(self._encoding),
            )
        except (bus.NoRespondersError, TimeoutError):
            return False
        return self._read(_cancels, answer).cancelled

    async def close(self) -> None:
        """Cancels what still runs and disconnects."""
        for client in (*self._tenant_clients, self):
            await client._end_streams()
        await self._connection.close()

    async def _open(self) -> None:
        await self._connection.subscribe(f"{self._inbox}.*", self._deliver)
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _end_streams(self) -> None:
        for stream in list(self._streams.values()):
            await stream.aclose()
        if self._ticker is not None:
            self._ticker.cancel()

    def _begin_span(self, model: str, request: messages.GenerateRequest, headers: tracing.Headers) -> tracing.Span:
        """As OpenTelemetry has it for whoever asks a model."""
        operation = "chat" if request.messages else "text_completion"
        known = {
            tracing.OPERATION: operation,
            tracing.MODEL: model,
            tracing.REQUEST_ID: request.id,
            tracing.TENANT: self._tenant,
            "gen_ai.provider.name": "tokenbus",
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.stream": request.stream is not False,
        }
        return tracing.start_span(self._tracer, f"{operation} {model}", "client", headers, known)

    def _send(self, stream: Stream, subject: str, request: messages.GenerateRequest) -> None:
        payload = codec.encode(request, self._encoding)
        stream.subject = subject
        place = secrets.token_hex(8)
        self._streams[place] = stream
        self._reply_tokens[stream] = place
        if self._inbox_error is not None:
            stream.fail(self._inbox_error)
            return
        headers = stream.trace_headers | (codec.content_headers(self._encoding) or {})
        try:
            self._connection.publish(subject, payload, reply=f"{self._inbox}.{place}", headers=headers)
        except bus.PayloadTooLargeError as error:
            stream.fail(errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)))
        except (bus.OutboundBufferLimitError, ConnectionError) as error:
            stream.fail(errors.make_error(errors.Code.NO_WORKER, str(error)))

    async def _ask(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        headers = codec.content_headers(self._encoding)
        try:
            return await self._connection.request(subject, payload, timeout_s, headers=headers)
        except bus.NoRespondersError as error:
            raise errors.request_error(errors.Code.NO_WORKER, "no router listens on this broker") from error
        except (TimeoutError, ConnectionError) as error:
            raise errors.request_error(errors.Code.NO_WORKER, str(error)) from error

    def _read(self, decoder: codec.Decoder[AnswerT], answer: Msg) -> AnswerT:
        """Raises RequestError(internal) for what can't be read: that is no fault of who asked."""
        try:
            return decoder.decode(answer.data, self._encoding)
        except errors.RequestError as error:
            text = f"the answer can't be read: {error.error.message}"
            raise errors.request_error(errors.Code.INTERNAL, text) from error

    def _deliver(self, message: Msg) -> None:
        place = message.subject.rpartition(".")[2]
        stream = self._streams.get(place.removesuffix(_RESYNC))
        if stream is None:
            if not place.endswith(_RESYNC):
                self._cancel_orphan(message)
        elif place.endswith(_RESYNC):
            stream.feed_resync(message.data, time.monotonic())
        elif bus.is_no_responders(message):
            stream.fail(errors.make_error(errors.Code.NO_WORKER, "no router listens on this broker"))
        else:
            stream.feed(message.data, time.monotonic())

    def _cancel_orphan(self, message: Msg) -> None:
        """A stream that was given up still speaks: has it ended, once."""
        try:
            chunk = _chunks.decode(message.data, self._encoding)
            is_new = chunk.finish_reason is None and self._orphans.get(chunk.id, time.monotonic()) is None
            if is_new:
                self._orphans.put(chunk.id, True, time.monotonic())
                self._connection.publish(self._names.cancel(chunk.id, self._tenant), b"")
        except (errors.RequestError, ValueError, ConnectionError, bus.OutboundBufferLimitError):
            return

    async def _tick_forever(self) -> None:
        """Keeps the silence rule for all streams."""
        ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            gap_s = now - ticked_at
            ticked_at = now
            for stream in list(self._streams.values()):
                stream.tick(now, gap_s if gap_s > _MAX_PAUSE_S else 0.0)

    def _permissions_violated(self, words: str) -> None:
        """Ends what can't be asked, or, of who may not listen to an inbox, everything."""
        hint = "see that tenant and inbox prefix are those of this user (--tenant, --nats-inbox)"
        error = errors.make_error(errors.Code.NO_WORKER, f"{words}: {hint}")
        for client in (*self._tenant_clients, self):
            if client._inbox.lower() in words.lower():  # nats-py tells it in lower case
                client._inbox_error = error
            for stream in list(client._streams.values()):
                if client._inbox_error is not None or f'"{stream.subject}"'.lower() in words.lower():
                    stream.fail_if_empty(error)

    def _reconnected(self) -> None:
        now = time.monotonic()
        for client in (*self._tenant_clients, self):
            for stream in list(client._streams.values()):
                stream.reconnected(now)


class _Transport:
    """What a stream may do at its client, for a request to one subject."""

    def __init__(self, client: Client, subject: str) -> None:
        self._client = client
        self._subject = subject

    def send_cancel(self, stream: Stream) -> None:
        client = self._client
        client._orphans.put(stream.request_id, True, time.monotonic())
        client._connection.publish(client._names.cancel(stream.request_id, client._tenant), b"")

    def send_resync(self, stream: Stream, offset: int) -> None:
        client = self._client
        with contextlib.suppress(ConnectionError, bus.OutboundBufferLimitError):
            client._connection.publish(
                client._names.resync(stream.request_id, client._tenant),
                codec.encode(messages.ResyncRequest(offset=offset), client._encoding),
                reply=f"{client._inbox}.{client._reply_tokens[stream]}{_RESYNC}",
                headers=codec.content_headers(client._encoding),
            )

    def resubmit(self, stream: Stream, request: messages.GenerateRequest) -> None:
        stream.request_id = secrets.token_urlsafe(16)
        self._client._send(stream, self._subject, codec.replace(request, id=stream.request_id))

    def forget(self, stream: Stream) -> None:
        place = self._client._reply_tokens.pop(stream, None)
        if place is not None:
            del self._client._streams[place]


def _request_of(fields: dict[str, Any]) -> messages.GenerateRequest:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), messages.GenerateRequest)
    except msgspec.ValidationError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error)) from error
