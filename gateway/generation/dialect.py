"""The interface of an API: its requests as those of the wire, and typed events as its responses. Each has a folder."""

import operator
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
        """Returns the events of one chunk of an answer. The answers to the first prompt are the first `n` choices."""
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
    """A valid request of an API, as requests of the wire, and the form that its response has."""

    @property
    def model(self) -> str: ...

    @property
    def requests(self) -> Sequence[messages.GenerateRequest]:
        """One for each prompt, each with an id that begins with that of the HTTP request."""
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
        """Returns the encoder of a response that is streamed."""
        ...

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerReader]) -> bytes:
        """Returns the body of a response that is not streamed. All answers have ended well."""
        ...

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns an error of a router or worker with the API's name of the field at fault."""
        ...


class Dialect(NamedTuple):
    """Reads the requests of one endpoint, and encodes its errors."""

    parse: Callable[[bytes, Mapping[str, str], str, str], ParsedRequest]
    """Parses and validates a body, with the request's headers, the id that it gets, and the model that is meant if it
    names none (empty if there is no such model). Raises RequestError with the
    API's name of the field at fault."""
    error_body: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")
    """Returns the status of an error response, where the API has others than the wire."""
    streamed_errors: frozenset[str] = frozenset()
    """Codes of errors of which a stream tells by an event even if they come before its first one."""
    repeats_logprobs: bool = False
    """Whether the last events of a stream repeat the log probabilities of earlier ones."""
