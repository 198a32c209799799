"""The interface of an API for calls: its requests as those of the wire, and the wire's replies as its responses."""

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
    """A valid request of an API, as a request of the wire, and the form that its response has."""

    @property
    def model(self) -> str: ...

    @property
    def request(self) -> RequestT_co: ...

    def encode(self, reply: ReplyT_contra) -> bytes:
        """Returns the body of the response."""
        ...

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns an error of a router or worker with the API's name of the field at fault."""
        ...


def _no_usage(reply: object) -> messages.Usage | None:
    return None


class CallDialect(NamedTuple, Generic[RequestT, ReplyT]):
    """Reads the requests of one endpoint, and encodes its errors."""

    parse: Callable[[bytes, Mapping[str, str], str, str], ParsedCall[RequestT, ReplyT]]
    """Parses and validates a body, with the request's headers, the id that it gets, and the model that is meant if it
    names none (empty if there is no such model). Raises RequestError with the API's name of the field at fault."""
    send: Callable[[Client, str, RequestT], Coroutine[Any, Any, ReplyT]]
    """Sends the request to the named model, by a method of the client. Raises RequestError."""
    error_body: Callable[[ErrorResponse], bytes]
    """Returns the body of an error response."""
    usage_of: Callable[[ReplyT], messages.Usage | None] = _no_usage
    """Returns the tokens that were computed for a reply."""
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")
    """Returns the status of an error response, where the API has others than the wire."""
