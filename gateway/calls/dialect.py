"""The interface of an API's calls: its requests as wire requests, and wire replies as its responses."""

import operator
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tokenbus.client import Client
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages

RequestT = TypeVar("RequestT")
RequestT_co = TypeVar("RequestT_co", covariant=True)
ReplyT = TypeVar("ReplyT")
ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)


class ParsedCall(Protocol[RequestT_co, ReplyT_contra]):
    """A valid request of an API, as a wire request, and the form of its response."""

    @property
    def model(self) -> str: ...

    @property
    def request(self) -> RequestT_co: ...

    def encode(self, reply: ReplyT_contra) -> bytes:
        """Returns the body of the response."""
        ...

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with the API's name for the field at fault."""
        ...


def _no_usage(reply: object) -> messages.Usage | None:
    return None


class CallDialect(NamedTuple, Generic[RequestT, ReplyT]):
    """Reads the requests of one endpoint, and encodes its errors."""

    parse: Callable[[bytes, Mapping[str, str], str, str], ParsedCall[RequestT, ReplyT]]
    """Parses and validates a body, given the request's headers, its id, and the default model if it names none (empty
    if there is none). Raises RequestError with the API's name for the field at fault."""
    send: Callable[[Client, str, RequestT], Coroutine[Any, Any, ReplyT]]
    """Sends the request to the named model, using a method of the client. Raises RequestError."""
    error_body: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    usage_of: Callable[[ReplyT], messages.Usage | None] = _no_usage
    """Returns the tokens computed for a reply."""
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")
    """Returns the status of an error response, where the API's differs from the wire's."""
