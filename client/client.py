"""The client of a Tokenbus system: `async with Client() as client: print(await client.generate(...).text())`."""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Self, Unpack

from tokenbus.client import answer, connecting, errors, event_loops
from tokenbus.client.connecting import ConnectOptions
from tokenbus.client.replies import Embeddings, PromptTokens, Ranking, ServedModelInfo
from tokenbus.client.stream import Stream
from tokenbus.client.wire import embedding, field_reader
from tokenbus.client.wire.request_fields import (
    DetokenizeFields,
    EmbedFields,
    GenerateFields,
    RerankFields,
    TokenizeFields,
)
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.protocol.wire.errors import RequestError


class Client:
    """A connection to a Tokenbus system, for one event loop. SyncClient has the same methods for other programs.

    `async with Client() as client:` connects, and cancels what still runs at the end of the block;
    `client = await Client.connect()` and `await client.close()` do the same without a block. Requests may run at the
    same time, in any number of tasks.

    Methods raise TokenbusError, whose subclasses say what can be done about it. A model is named as workers serve it;
    `<model>:<adapter>` is the model with a LoRA adapter. The name may be left out while only one served model can do
    what is asked; if there are several, the InvalidRequestError names them."""

    def __init__(self, url: str | None = None, **options: Unpack[ConnectOptions]) -> None:
        """`url` is the address of the NATS broker, or several of one cluster, separated by commas. The variable
        TOKENBUS_NATS replaces the default, a broker on this machine.

        Raises TypeError for an unknown option, and ValueError for one that can't be used."""
        known = ConnectOptions.__optional_keys__
        for name in options:
            if name not in known:
                problem = field_reader.unknown_field(name, known).error.message
                raise TypeError(problem)
        self._settings = connecting.settings_of(url, options)
        self._encoding = codec.Encoding(options.get("encoding", codec.Encoding.JSON))
        self._tenant = options.get("tenant", subjects.DEFAULT_TENANT)
        subjects.encode_name(self._tenant)  # raises ValueError for one that can't be a name
        self._prefix = options.get("prefix", subjects.DEFAULT_PREFIX)
        self._tracer = options.get("tracer")
        self._open: WireClient | None = None
        self._loop: asyncio.AbstractEventLoop
        """The event loop in which it was last connected."""
        self._is_connecting = False

    def __repr__(self) -> str:
        state = f"{self._open.num_streams} streams" if self._open else "not connected"
        return f"<Client of {self._settings.redacted_url}, {state}>"

    @classmethod
    async def connect(cls, url: str | None = None, **options: Unpack[ConnectOptions]) -> Self:
        """Returns a connected client; close it with `close`. Raises what the constructor raises, and
        BrokerUnreachableError, which is also a ConnectionError."""
        client = cls(url, **options)
        await client.__aenter__()
        return client

    async def __aenter__(self) -> Self:
        if self._open is not None:  # by `connect`
            event_loops.require(self._loop, "this client")
            return self
        if self._is_connecting:
            raise RuntimeError("this client is being connected by another task")
        self._is_connecting = True
        try:
            self._loop = event_loops.running("a Client")
            self._open = await WireClient.connect(
                settings=self._settings,
                tenant=self._tenant,
                prefix=self._prefix,
                encoding=self._encoding,
                tracer=self._tracer,
            )
        except ConnectionError as error:
            raise errors.broker_unreachable(str(error)) from error
        finally:
            self._is_connecting = False
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels all running requests and disconnects. Idempotent."""
        if self._open is not None:
            wire, self._open = self._wire, None
            await wire.close()

    def generate(
        self,
        model: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        resume: bool = True,
        **fields: Unpack[GenerateFields],
    ) -> Stream:
        """Requests a completion and returns its stream at once: iterate it, or wait for its `text()` or `answer()`.

        Pass `prompt`, `messages` or `token_ids`, and any other field of the request; docs/wire.md says what they mean.
        `headers` may name the trace that the request belongs to (`traceparent`). A request whose worker is lost
        continues at another one; with `resume=False` it fails if it has begun. Raises InvalidRequestError for an
        unknown field or a value of a wrong type. The stream raises all other errors."""
        wire = self._wire
        with _raising():
            request = field_reader.read(fields, messages.GenerateRequest)
            stream = wire.generate(_checked(model), request, headers=headers, resume=resume)
        return Stream(stream, self._loop)

    async def embed(self, model: str | None = None, **fields: Unpack[EmbedFields]) -> Embeddings:
        """Returns a vector for each `input`: one text, or a list of any number of texts or lists of token ids."""
        with _raising():
            request = field_reader.read(fields, messages.EmbedRequest)
            request = codec.replace(request, id=request.id or secrets.token_urlsafe(16), encoding="base64")
            reply = await embedding.embed(self._wire, await self._model(model, "embed"), request)
        return Embeddings(
            model=reply.model or None,
            embeddings=[embedding.numbers_of(row) for row in reply.embeddings or ()],
            usage=answer.usage_of(reply.usage or None),
        )

    async def rerank(self, model: str | None = None, **fields: Unpack[RerankFields]) -> Ranking:
        """Returns the `documents` in the order of their relevance to the `query`."""
        with _raising():
            request = field_reader.read(fields, messages.RerankRequest)
            reply = await self._wire.rerank(await self._model(model, "rerank"), request)
        return Ranking(
            model=reply.model or None, results=reply.results or [], usage=answer.usage_of(reply.usage or None)
        )

    async def tokenize(self, model: str | None = None, **fields: Unpack[TokenizeFields]) -> PromptTokens:
        """Returns the tokens of a `prompt` or of `messages`, or with `only_count` their number."""
        with _raising():
            request = field_reader.read(fields, messages.TokenizeRequest)
            reply = await self._wire.tokenize(await self._model(model), request)
        return PromptTokens(
            model=reply.model or None,
            count=reply.count or 0,
            token_ids=reply.token_ids or [],
            context_length=reply.context_length or None,
            tokenizer=reply.tokenizer or None,
        )

    async def detokenize(self, model: str | None = None, **fields: Unpack[DetokenizeFields]) -> str:
        """Returns the text that `token_ids` have in an answer."""
        with _raising():
            request = field_reader.read(fields, messages.DetokenizeRequest)
            reply = await self._wire.detokenize(await self._model(model), request)
        return reply.text or ""

    async def models(self, timeout_s: float = 5.0) -> list[ServedModelInfo]:
        """Returns the models that are being served. Raises UnavailableError if no router answers in time."""
        with _raising():
            reply = await self._wire.models(timeout_s, with_workers=False)
        return [
            ServedModelInfo(
                name=one.model,
                context_length=one.context_length,
                features=one.features,
                adapters=one.adapters,
                loadable=one.loadable or False,
            )
            for one in reply.models
        ]

    async def cancel(self, request_id: str, timeout_s: float = 2.0) -> bool:
        """Cancels any request of this tenant, whoever made it; its stream raises RequestCancelledError. Returns False
        if no process holds a request with that id."""
        if not subjects.is_request_id(request_id):
            raise errors.invalid("request_id", "an id is 1 to 128 of A-Za-z0-9_-")
        with _raising():
            return await self._wire.cancel(request_id, timeout_s)

    async def keep_session(self, model: str | None = None, *, session_id: str, ttl_s: float = 300.0) -> None:
        """Asks the model's workers to keep the cached prefixes of one of this tenant's sessions for that long. This is
        a hint: its effect is not reported."""
        with _raising():
            await self._wire.keep_session(await self._model(model, "generate"), session_id, ttl_s)

    async def end_session(self, model: str | None = None, *, session_id: str) -> None:
        """Says that one of this tenant's sessions has ended: what only it has cached is evicted first."""
        with _raising():
            await self._wire.end_session(await self._model(model, "generate"), session_id)

    async def _model(self, model: str | None, feature: str = "") -> str:
        """Returns the model to ask: without a name, the only one that has this feature. Raises InvalidRequestError."""
        return _checked(model) or await self._wire.default_model(feature)

    @property
    def _wire(self) -> WireClient:
        """The connected client. Raises RuntimeError if there is none, or if it belongs to another event loop."""
        if self._open is None:
            raise RuntimeError("this client is not connected: use `async with Client() as client`, or Client.connect()")
        event_loops.require(self._loop, "this client")
        return self._open


@contextlib.contextmanager
def _raising() -> Iterator[None]:
    """Raises the wire's errors as the library's."""
    try:
        yield
    except RequestError as error:
        raise errors.exception_of(error.error) from error.__cause__


def _checked(model: str | None) -> str | None:
    """Returns the name of a model, or None for none. Raises InvalidRequestError."""
    if model is None:
        return None
    try:
        subjects.encode_name(model)
    except ValueError as error:
        raise errors.invalid("model", str(error)) from None
    return model
