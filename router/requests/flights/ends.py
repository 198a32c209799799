"""Tells those who keep accounts that a request has ended, once in the whole fleet.

The router that tells it is the request's guardian, or has received the call: a router that only reads of an end in a
worker's log tells nothing, and neither does one that gives a request to another router. A request whose guardian is
killed has none for a moment; one that ends in this moment is told by no router, rather than by two."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import UnsetType

from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.router.requests.flights.flight import Flight

BY_WORKER = "by_worker"
"""The reason of an end that the worker has sent the client: the router does not know more of it."""


class RequestEnd(NamedTuple):
    """A request that has ended, and what is known of it."""

    operation: str
    """`generate`, or the call: `embed`, `rerank`, `tokenize`, `detokenize`, `cache`."""
    address: subjects.ModelAddress
    request_id: str
    reason: str
    """The finish reason of a terminal that this router has sent, `by_worker`, or `ok` or `error` of a call."""
    code: errors.Code | None
    """The error with which this router has ended it."""
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was cached."""
    completion_tokens: int
    """All sampled tokens. It may lack some of a stream that a router has forgotten for want of memory."""
    adapters: tuple[str, ...] = ()
    """The names of its adapters, if its first guardian tells its end."""


class RequestEnds:
    """The ends of one router's requests."""

    def __init__(self) -> None:
        self._heard_by: list[Callable[[RequestEnd], None]] = []

    def __repr__(self) -> str:
        return f"<RequestEnds, heard by {len(self._heard_by)}>"

    def add(self, callback: Callable[[RequestEnd], None]) -> None:
        """Has a callback told of each end from now on. It must neither raise nor wait."""
        self._heard_by.append(callback)

    def tell_flight(self, flight: Flight, reason: str, code: errors.Code | None = None) -> None:
        if not self._heard_by:
            return
        first = flight.completion.first_token
        adapters = tuple(one.name for one in flight.request.lora or ())
        self._tell(
            RequestEnd(
                "generate",
                flight.address,
                flight.request_id,
                reason,
                code,
                flight.num_prompt_tokens,
                first.cached_tokens if first else 0,
                flight.num_streamed_tokens,
                adapters,
            )
        )

    def tell_call(
        self,
        operation: str,
        address: subjects.ModelAddress,
        request_id: str,
        code: errors.Code | None,
        usage: messages.Usage | UnsetType | None,
    ) -> None:
        if not self._heard_by:
            return
        reason, tokens = "error" if code else "ok", usage.prompt_tokens if usage else 0
        self._tell(RequestEnd(operation, address, request_id, reason, code, tokens, 0, 0))

    def _tell(self, end: RequestEnd) -> None:
        for callback in self._heard_by:
            callback(end)
