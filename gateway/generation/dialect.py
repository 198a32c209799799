"""The interface of an API: its requests as those of the wire, and typed events as its responses. Each has a folder."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tokenbus.gateway.generation.answer_events import AnswerEvent, AnswerReader
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages


class ResponseHead(NamedTuple):
    """The fields of a response that are known before the answer."""

    request_id: str
    created: int
    """Unix seconds."""
    model: str
    """The name under which the client knows the model."""


class EventEncoder(Protocol):
    """Encodes the answers to one request as server-sent events."""

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer. Requests for several answers (`n`) have as many choices."""
        ...

    def end(self) -> list[bytes]:
        """Returns what follows the ends of all answers."""
        ...

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the events with which the response ends, if an answer fails after the response has begun."""
        ...

    def keep_alive(self) -> bytes:
        """Returns what is sent while nothing comes, so that no proxy closes the connection."""
        ...


class ParsedRequest(Protocol):
    """A valid request of an API, as a request of the wire, and the form that its response has."""

    @property
    def model(self) -> str: ...

    @property
    def request(self) -> messages.GenerateRequest: ...

    @property
    def stream(self) -> bool:
        """Whether the response is a stream of events."""
        ...

    @property
    def n(self) -> int:
        """The number of answers."""
        ...

    def encoder(self, head: ResponseHead) -> EventEncoder:
        """Returns the encoder of a response that is streamed."""
        ...

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerReader]) -> bytes:
        """Returns the body of a response that is not streamed. All answers have ended well."""
        ...

    def error_body(self, error: ErrorResponse) -> bytes:
        """Returns the body of the error response to this request, with the API's name of the field at fault."""
        ...


class Dialect(NamedTuple):
    """Reads the requests of one endpoint, and encodes its errors."""

    parse: Callable[[bytes, Mapping[str, str], str], ParsedRequest]
    """Parses and validates a body, with the request's headers and the id that it gets. Raises RequestError with the
    API's name of the field at fault."""
    error_body: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    streamed_errors: frozenset[str] = frozenset()
    """Codes of errors of which a stream tells by an event even if they come before its first one."""
