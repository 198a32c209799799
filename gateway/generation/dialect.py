"""The interface of an API: its requests as wire requests, and typed events as its responses. Each has a folder."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tokenbus.gateway.generation.answer_events import AnswerEvent, AnswerEventReader
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages


class ResponseHead(NamedTuple):
    """The fields of a response known before the answer."""

    request_id: str
    created: int
    """Unix seconds."""
    model: str
    """The name by which the client knows the model."""


class EventEncoder(Protocol):
    """Encodes the answers to one request as server-sent events."""

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer. The first `n` choices are the answers to the first prompt."""
        ...

    def end(self) -> list[bytes]:
        """Returns what follows when all answers have ended."""
        ...

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the events that end the response if an answer fails after the response has started."""
        ...

    def keep_alive(self) -> bytes:
        """Returns what is sent during silence, so that no proxy closes the connection."""
        ...


class ParsedRequest(Protocol):
    """A valid request of an API, as wire requests, and the form of its response."""

    @property
    def model(self) -> str: ...

    @property
    def requests(self) -> Sequence[messages.GenerateRequest]:
        """One for each prompt, each with an id that begins with the HTTP request's."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the response is a stream of events."""
        ...

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        ...

    def encoder(self, head: ResponseHead) -> EventEncoder:
        """Returns the encoder of a streamed response."""
        ...

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response. All answers have ended successfully."""
        ...

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with the API's name for the field at fault."""
        ...


class Dialect(NamedTuple):
    """Reads the requests of one endpoint, and encodes its errors."""

    parse: Callable[[bytes, Mapping[str, str], str, str], ParsedRequest]
    """Parses and validates a body, given the request's headers, its id, and the default model if it names none (empty
    if there is none). Raises RequestError with the API's name for the field at fault."""
    error_body: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")
    """Returns the status of an error response, where the API's differs from the wire's."""
    streamed_errors: frozenset[str] = frozenset()
    """Codes of errors that a stream reports in an event even before its first one."""
    repeats_logprobs: bool = False
    """Whether the last events of a stream repeat the log probabilities of earlier ones."""
