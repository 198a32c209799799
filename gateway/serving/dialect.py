"""The interface of an API: a dialect is its endpoints and the form of its errors.

An endpoint says which fields a body may have and turns a body into requests of the bus, with the encoder of their
answer: a stream of events or a whole one (`ParsedGeneration`), or the one reply of a call that generates nothing
(`ParsedCall`). `endpoint.py` does the rest, in the same way for all of them."""

import dataclasses
import operator
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.http import http_errors, rate_limit_headers
from tokenbus.gateway.http.body import LargeBodyParser
from tokenbus.gateway.http.http_errors import ErrorResponse, NameOf
from tokenbus.gateway.http.response_writer import EVENT_STREAM, LimitHeaders
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.answer_events import AnswerEvent, AnswerEventReader
from tokenbus.gateway.serving.catalog import Listing
from tokenbus.gateway.storage.records import TenantRecords
from tokenbus.protocol.access.usage_store import UsageStore
from tokenbus.protocol.wire import codec, errors, messages, subjects

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


def loading_comment(load_progress: float | None) -> bytes:
    """Returns the comment of an event stream that says how much of the model is loaded; empty if none is loading."""
    return b"" if load_progress is None else b": loading the model, %d %%\n\n" % round(100 * load_progress)


class ResponseHead(NamedTuple):
    """The fields of a response known before the answer."""

    request_id: str
    created: int
    """Unix seconds."""
    model: str
    """The name by which the client knows the model."""
    age_s: Callable[[], float] = float
    """Returns the seconds since the request was received."""


class AnswerEncoder(Protocol):
    """Encodes the answers to one request, as server-sent events or as one body."""

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer. The first `n` choices are the answers to the first prompt."""
        ...

    def end(self) -> list[bytes]:
        """Returns what follows when all answers have ended."""
        ...

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the events that end the response if an answer fails after the response has started."""
        ...

    def keep_alive(self, load_progress: float | None) -> bytes:
        """Returns what is sent during silence, so that no proxy closes the connection. `load_progress` is the share of
        the model that is loaded, 0 to 1, while a worker loads it."""
        ...

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response. All answers have ended successfully."""
        ...


class RecordingEncoder(AnswerEncoder, Protocol):
    """Encodes an answer that is to be stored before its end is sent."""

    def records(self, answers: Sequence[AnswerEventReader]) -> Mapping[str, bytes]:
        """Returns what is to be stored of the answers, which have all ended successfully, by name."""
        ...

    def stored(self, is_stored: bool) -> None:
        """Takes note whether that could be stored. Called before the end is encoded."""
        ...


class PromptShowingEncoder(AnswerEncoder, Protocol):
    """Encodes answers together with the tokens of their prompts."""

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Takes the token ids of each prompt. Called before anything is encoded."""
        ...


class _Parsed(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    name_of: NameOf = str
    """Returns the API's name for a field of the bus's request."""

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with the API's name for the field at fault."""
        return http_errors.renamed(error, self.name_of)


class ParsedGeneration(_Parsed, frozen=True, kw_only=True):
    """A valid request that generates."""

    requests: Sequence[messages.GenerateRequest]
    """One for each prompt, each with an id that begins with the HTTP request's."""
    encoder: Callable[[ResponseHead], AnswerEncoder]
    stream: bool
    """Whether the response is a stream of events."""
    n: int = 1
    """The number of answers to each prompt."""
    counts_tokens: bool = False
    """Whether the encoder needs the number of sampled tokens with each piece of a stream."""
    shows_prompts: bool = False
    """Whether the response has the tokens of the prompts: the encoder is a PromptShowingEncoder then."""
    is_stored: bool = False
    """Whether the answer is to be stored: the encoder is a RecordingEncoder then."""


class ParsedCall(_Parsed, Generic[RequestT, ReplyT], frozen=True, kw_only=True):
    """A valid request with a single reply, for which nothing is generated."""

    request: RequestT
    send: Callable[[WireClient, str, RequestT], Coroutine[Any, Any, ReplyT]]
    """Sends the request to the named model, using a method of the client. Raises RequestError."""
    encode: Callable[[ReplyT], bytes]
    """Returns the body of the response."""
    encode_timed: Callable[[ReplyT, float], bytes] | None = None
    """Is called instead, if given, for a response that has the seconds since the request was received."""
    usage_of: Callable[[ReplyT], messages.Usage | None] = lambda reply: None
    """Returns the tokens computed for a reply."""


Parsed = ParsedGeneration | ParsedCall[Any, Any]


class RequestHead(NamedTuple):
    """A request apart from its body."""

    id: str
    model: str
    session: str | None
    """The session that a header names."""
    earlier: Mapping[str, bytes | None] = {}
    """The records that the body refers to and that were read; None for one that does not exist."""
    max_record_bytes: int = 0
    """The most bytes that can be stored of this request; 0: nothing is stored."""


class UnservedField(NamedTuple):
    """A field that is known and not served: anything but a harmless value is refused."""

    problem: str
    harmless: tuple[object, ...] = (None,)

    def is_harmless(self, value: object) -> bool:
        """Whether a value changes nothing. false is not 0 here, although Python's are equal."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)


class _Inside(NamedTuple):
    """A field of an object in the body, or of each object in a list, that is known and not served."""

    owner: str
    """With `[]` at its end if it is a list."""
    name: str
    field: UnservedField

    def check(self, body: object) -> None:
        """Raises RequestError unless its values in a body are harmless."""
        owner = self.owner.removesuffix("[]")
        given = getattr(body, owner)
        if isinstance(given, list):
            for index, one in enumerate(given):
                if (value := getattr(one, self.name)) is not None and not self.field.is_harmless(value):
                    raise errors.unsupported_field(f"{owner}[{index}].{self.name}", self.field.problem)
        elif given is not None and not self.field.is_harmless(getattr(given, self.name)):
            raise errors.unsupported_field(f"{owner}.{self.name}", self.field.problem)


class UnnamedModelError(Exception):
    """A body names no model, and it has not been said which one it means."""


class UnreadRecordsError(Exception):
    """A body refers to stored records, which have not been read yet."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"{len(names)} records")
        self.names = names


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...


BodyT = TypeVar("BodyT", bound=_Body)


def _with_fields(body: type[BodyT], names: Iterable[str]) -> type[BodyT]:
    """Returns a struct that has more fields, each with whatever value a body gives it."""
    fields = [(name, Any, None) for name in names]
    more: Any = msgspec.defstruct(body.__name__, fields, bases=(body,), frozen=True, kw_only=True)
    return cast(type[BodyT], more)


@dataclasses.dataclass(kw_only=True, eq=False)
class ApiEndpoint(Generic[BodyT]):
    """An endpoint that takes a body, or by GET its fields in the query."""

    path: str
    summary: str
    body: type[BodyT]
    """The struct with the fields that are served; unknown ones are ignored."""
    read: Callable[[BodyT, RequestHead], Parsed]
    """Validates a body as a router would, and turns it into requests of the bus. Raises RequestError with the API's
    name for the field at fault."""
    response: Any
    """The type of the response: a struct, or a union of types."""
    event: type[msgspec.Struct] | None = None
    """The data of the events of a streamed response, if there can be one."""
    event_type: str = EVENT_STREAM
    """The media type of a streamed response."""
    method: str = "POST"
    feature: str = "generate"
    """The feature that the request needs of its model, by which one is found for a body that names none."""
    required: tuple[str, ...] = ()
    """Required fields of the body, which may not be null, nor empty unless named in `may_be_empty`."""
    may_be_empty: tuple[str, ...] = ()
    """Lists."""
    one_of: tuple[str, ...] = ()
    """Lists of which exactly one is required, which may not be empty. `read` checks that."""
    unserved: Mapping[str, UnservedField] = dataclasses.field(default_factory=dict)
    """Known fields that only have the values that change nothing. Those of objects in the body are named `owner.name`,
    or `owner[].name` of the objects in a list, and are fields of the objects' structs too."""
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Known fields, named like those of `unserved`, that are not in the struct, or only checked, since no value of them
    changes an answer; with the reason."""
    free_form: frozenset[str] = codec.FREE_FORM
    """Names of fields whose values are passed on as they are."""
    streamed_errors: frozenset[str] = frozenset()
    """Codes of errors that a stream reports in an event even before its first one."""
    repeats_logprobs: bool = False
    """Whether the last events of a stream repeat the log probabilities of earlier ones."""

    def __post_init__(self) -> None:
        # compared at once: there are a hundred, of which most bodies have none
        self._unserved = {name: field for name, field in self.unserved.items() if "." not in name}
        self._decoder = codec.Decoder(_with_fields(self.body, self._unserved), self.free_form)
        self._unserved_values = _values_of(tuple(self._unserved))
        self._absent = (None,) * len(self._unserved)
        self._unserved_inside = [
            _Inside(*name.partition(".")[::2], field) for name, field in self.unserved.items() if "." in name
        ]

    def parse(
        self,
        payload: bytes,
        headers: Mapping[str, str],
        request_id: str,
        default_model: str = "",
        earlier: Mapping[str, bytes | None] | None = None,
        max_record_bytes: int = 0,
    ) -> Parsed:
        """Parses and validates a body. `default_model`, unless empty, is the model of a body that names none; the rest
        is that of `RequestHead`.

        Raises UnnamedModelError for a body without a model or default, UnreadRecordsError for one that refers to
        records not in `earlier`, and RequestError or ApiError with the API's name for the field at fault."""
        codec.check_structure(payload, codec.Encoding.JSON)
        body = self._decoder.decode(payload, codec.Encoding.JSON)
        model = _checked_model(body.model or default_model)
        given = self._unserved_values(body)
        if given != self._absent:
            for (name, field), value in zip(self._unserved.items(), given, strict=True):
                if not field.is_harmless(value):
                    raise errors.unsupported_field(name, field.problem)
        for inside in self._unserved_inside:
            inside.check(body)
        session = conversation.session_of(headers)
        return self.read(body, RequestHead(request_id, model, session, earlier or {}, max_record_bytes))


class Resource(NamedTuple):
    """An endpoint that describes models: by GET or, if it has a body, by POST."""

    path: str
    summary: str
    response: type[msgspec.Struct]
    answer: Callable[[Listing, str], msgspec.Struct]
    """Returns the response, given the models visible to the request and the name in its path or body. Raises
    RequestError."""
    body: type[msgspec.Struct] | None = None
    model_in: Callable[[bytes], str] | None = None
    """Returns the model that a body names. Raises RequestError."""
    is_public: bool = False
    """If so, requests need no key, and the listing is empty."""


class RecordResource(NamedTuple):
    """An endpoint for something that is stored: its path names it as `{id}`."""

    method: str
    path: str
    summary: str
    response: type[msgspec.Struct]
    answer: Callable[[TenantRecords, str, Mapping[str, str], LargeBodyParser], Awaitable[bytes]]
    """Returns the body of the response, given the tenant's records, the name in the path, the query, and what expands
    records. Raises RequestError and ApiError."""
    query: Mapping[str, Any] = {}
    """The types of the known parameters of the query, by name."""


class Report(NamedTuple):
    """An endpoint that tells what was used, in JSON or another form."""

    path: str
    summary: str
    response: type[msgspec.Struct]
    answer: Callable[[UsageStore, Caller, Mapping[str, Sequence[str]], str, float], Awaitable[tuple[bytes, str]]]
    """Returns the body and its media type, given who asks, the query, the header `Accept` and the Unix time. Raises
    RequestError and ApiError."""
    query: Mapping[str, Any]
    """The types of the known parameters of the query, by name."""


class RefusedPath(NamedTuple):
    """A path of an API that is known and not served."""

    path: str
    methods: tuple[str, ...]
    problem: str
    """Why, or what is served instead."""


class ErrorForm(NamedTuple):
    """The form of an API's errors."""

    encode: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    schema: type[msgspec.Struct]
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")
    """Returns the status of an error response, where the API's differs from the wire's."""
    limit_headers: LimitHeaders = rate_limit_headers.to_openai
    """Returns the headers that say what a client has left of its limits."""


class Dialect(NamedTuple):
    """An API."""

    errors: ErrorForm
    endpoints: Sequence[ApiEndpoint[Any]] = ()
    resources: Sequence[Resource] = ()
    records: Sequence[RecordResource] = ()
    reports: Sequence[Report] = ()
    refused: Sequence[RefusedPath] = ()
    prefixes: tuple[str, ...] = ()
    """Beginnings of the paths that are only this API's."""
    has_bare_paths: bool = False
    """Whether its paths are served without `/v1` too, for clients whose base URL lacks it."""
    takes_any_type: bool = False
    """Whether bodies need no content type, as those of curl that is not told one."""
    header: str | None = None
    """A header that asks for this API, where several share a path."""

    def paths_of(self, path: str) -> tuple[str, ...]:
        """Returns all paths under which a path of this API is served."""
        bare = path.removeprefix("/v1")
        return (path, bare) if self.has_bare_paths and bare != path else (path,)


def _values_of(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """Returns a function that returns the values of a body's fields."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda body: tuple(getattr(body, name) for name in names)


def _checked_model(name: str) -> str:
    if not name:
        raise UnnamedModelError
    try:
        subjects.encode_name(name)
    except ValueError as error:
        raise errors.invalid_field("model", str(error)) from error
    return name
