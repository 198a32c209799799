"""Tells those who keep accounts that a request has ended, once in the whole fleet.

The router that tells it is the request's guardian, or has received the call: a router that only reads of an end in a
worker's log tells nothing, and neither does one that gives a request to another router. Which router is the guardian
says the worker that has ended the stream: the one that it has named last, which may be stopping and waits for that. A
request whose guardian is killed has none for a moment; one that ends in this moment is told by no router, rather than
by two."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import UnsetType

from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.router.requests.flights.flight import Flight

BY_WORKER = "by_worker"
"""The reason of an end that the worker has sent the client, if that worker does not say more."""
_CANCELLED = errors.Code.CANCELLED


class RequestEnd(NamedTuple):
    """A request that has ended, and what is known of it."""

    operation: str
    """`generate`, or the call: `embed`, `rerank`, `tokenize`, `detokenize`, `cache`."""
    address: subjects.ModelAddress
    request_id: str
    reason: str
    """The finish reason of its terminal, `by_worker`, or `ok` or `error` of a call."""
    code: errors.Code | None
    """The error with which it has ended; `cancelled` for a stream that was cancelled, too."""
    prompt_tokens: int
    """0 if no worker has had it."""
    cached_tokens: int
    """The part of the prompt that was cached."""
    completion_tokens: int
    """All sampled tokens. It may lack some of a stream that a router has forgotten for want of memory."""
    adapters: tuple[str, ...] = ()
    """The names of its adapters."""


class RequestEnds:
    """The ends of one router's requests."""

    def __init__(self, router_id: str = "") -> None:
        self._router_id = router_id
        self.on_flight: Callable[[Flight, str, errors.Code | None, tuple[int, int, int]], None] = _ignore
        """Told of the end of each flight, with its reason, its error, and the tokens of its prompt, those of them that
        were cached, and those of its completion. It must neither raise nor wait."""
        self._heard_by: list[Callable[[RequestEnd], None]] = []
        self._refusals_heard_by: list[Callable[[RequestEnd], None]] = []

    def __repr__(self) -> str:
        return f"<RequestEnds, heard by {len(self._heard_by)}>"

    @property
    def are_heard(self) -> bool:
        return bool(self._heard_by)

    def add(self, callback: Callable[[RequestEnd], None], *, hears_refusals: bool = False) -> None:
        """Has a callback told of each end from now on, and perhaps of requests that were refused before they began. It
        must neither raise nor wait."""
        self._heard_by.append(callback)
        if hears_refusals:
            self._refusals_heard_by.append(callback)

    def tell_ended_by_worker(self, flight: Flight) -> None:
        """Tells of a stream that its worker has ended, if this router is its guardian."""
        end = flight.end
        if end is None:  # workers of earlier versions do not say who is
            if flight.is_named:
                self.tell_flight(flight, BY_WORKER)
        elif end.router_id == self._router_id:
            reason, code = str(end.finish_reason), _known(end.code) if end.code else None
            tokens = (end.prompt_tokens, end.cached_tokens, end.completion_tokens)
            self._tell_flight(flight, reason, code, tokens)

    def tell_flight(self, flight: Flight, reason: str, code: errors.Code | None = None) -> None:
        """Tells of a request that this router has ended itself."""
        first = flight.completion.first_token
        was_accepted = flight.first_accepted_at is not None
        tokens = (flight.num_prompt_tokens, first.cached_tokens if first else 0, flight.num_streamed_tokens)
        self._tell_flight(flight, reason, code, tokens if was_accepted else (0, 0, 0))

    def tell_refused(self, operation: str, address: subjects.ModelAddress, request_id: str, code: errors.Code) -> None:
        """Tells of a request that never began."""
        for callback in self._refusals_heard_by:
            callback(RequestEnd(operation, address, request_id, "error", code, 0, 0, 0))

    def _tell_flight(self, flight: Flight, reason: str, code: errors.Code | None, tokens: tuple[int, int, int]) -> None:
        self.on_flight(flight, reason, code, tokens)
        if not self._heard_by:
            return
        if code is None and reason == messages.FinishReason.CANCELLED:
            code = _CANCELLED
        adapters = tuple(one.name for one in flight.request.lora or ())
        self._tell(RequestEnd("generate", flight.address, flight.request_id, reason, code, *tokens, adapters))

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


def _ignore(flight: Flight, reason: str, code: errors.Code | None, tokens: tuple[int, int, int]) -> None:
    pass


def _known(code: str) -> errors.Code:
    """Returns the code that a worker names; workers of later versions may have others."""
    try:
        return errors.Code(code)
    except ValueError:
        return errors.Code.INTERNAL
