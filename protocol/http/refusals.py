"""Responses that the server itself sends to input that never reaches the application."""

import dataclasses
import enum

Headers = list[tuple[bytes, bytes]]


class Reason(enum.StrEnum):
    """Why the server has closed or refused a connection."""

    MALFORMED = "malformed"
    SLOW_HEAD = "slow_head"
    SLOW_READER = "slow_reader"
    EVICTED = "evicted"
    """It was idle, and was evicted to make room for another."""
    TOO_MANY_PER_ADDRESS = "too_many_per_address"
    TOO_MANY = "too_many"


@dataclasses.dataclass(frozen=True)
class HttpRefusal:
    """A response by the server itself."""

    status: int
    message: str
    code: str
    reason: Reason


TOO_MANY_PER_ADDRESS = HttpRefusal(
    429, "too many connections from this address", "too_many_connections", Reason.TOO_MANY_PER_ADDRESS
)
TOO_MANY = HttpRefusal(503, "too many connections", "overloaded", Reason.TOO_MANY)
SLOW_HEAD = HttpRefusal(408, "the head of the request was not received in time", "request_timeout", Reason.SLOW_HEAD)
EVICTED = HttpRefusal(
    408, "there are too many connections, and this one has been idle longest", "request_timeout", Reason.EVICTED
)


def malformed(status: int, problem: str) -> HttpRefusal:
    """Returns the response to input that can't be parsed as a request."""
    code = "headers_too_large" if status == 431 else "invalid_http"
    return HttpRefusal(status, f"this is not a valid HTTP request: {problem}", code, Reason.MALFORMED)


def plain_text_response(refusal: HttpRefusal, path: str) -> tuple[int, Headers, bytes]:
    """Returns the status, headers and body of a refusal as human-readable text."""
    return refusal.status, [(b"content-type", b"text/plain; charset=utf-8")], f"{refusal.message}\n".encode()
