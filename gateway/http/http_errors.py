"""Error responses, before a dialect gives them the body that its clients expect; pure."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from tokenbus.protocol.wire import codec, errors, messages


class ErrorResponse(NamedTuple):
    """The status, the reason and the headers of an HTTP response with an error."""

    status: int
    code: str
    """A code of the wire, or one of the gateway's own."""
    message: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request may succeed later. The SDKs retry by themselves unless told not to."""
    retry_after_ms: float | None = None
    prompt_tokens: int | None = None
    """In `prompt_too_long`."""
    context_length: int | None = None
    """In `prompt_too_long`."""
    request_id: str | None = None
    """The id of the HTTP request, where it has one."""

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        if self.retry_after_ms is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_ms / 1e3))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_ms))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class ApiError(Exception):
    """Ends an HTTP request with an error response."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(f"{response.code}: {response.message}")
        self.response = response


def from_error(error: errors.Error) -> ErrorResponse:
    """Returns the response for an error of the wire."""
    return ErrorResponse(
        errors.CODES[error.code].http,
        str(error.code),
        error.message,
        error.param,
        error.retryable,
        error.retry_after_ms,
        error.prompt_tokens,
        error.context_length,
    )


_FIELD = re.compile(r"\w+")


def with_names(error: errors.Error, names: Mapping[str, str]) -> errors.Error:
    """Returns an error of the wire with an API's name of the field at fault. `names` has those that differ."""
    field = _FIELD.match(error.param or "")
    if field is None or field[0] not in names:
        return error
    theirs = names[field[0]]
    # Messages of validation begin with the field's name.
    message = error.message
    if message.startswith(field[0]):
        message = theirs + message.removeprefix(field[0])
    return codec.replace(error, message=message, param=theirs + (error.param or "").removeprefix(field[0]))


def from_terminal(chunk: messages.Chunk) -> ErrorResponse | None:
    """Returns the response for a failed stream, or None if the chunk is no terminal or a successful one."""
    if chunk.finish_reason is messages.FinishReason.ERROR:
        return from_error(chunk.error or errors.make_error(errors.Code.INTERNAL))
    return CANCELLED if chunk.finish_reason is messages.FinishReason.CANCELLED else None


CANCELLED = ErrorResponse(499, "cancelled", "the request was cancelled")
"""Somebody else has cancelled the request (`tokenbus cancel`). The SDKs don't retry a 499."""
INVALID_API_KEY = ErrorResponse(
    401, "invalid_api_key", "a valid API key is required: Authorization: Bearer KEY, x-api-key: KEY or api-key: KEY"
)
OVERLOADED = ErrorResponse(503, "overloaded", "this gateway has too many open requests", None, True, 1_000.0)
SHUTTING_DOWN = ErrorResponse(503, str(errors.Code.SHUTTING_DOWN), "this gateway is shutting down", None, True, 1_000.0)
TENANT_STARTING = ErrorResponse(
    503, "overloaded", "this key is new, and its tenant is not ready yet", None, True, 1_000.0
)
BODY_TIMEOUT = ErrorResponse(408, "request_timeout", "the body was not received in time", None, True)
UNSUPPORTED_MEDIA_TYPE = ErrorResponse(
    415, "unsupported_media_type", "the request must be sent with Content-Type: application/json"
)
INTERNAL_ERROR = from_error(errors.make_error(errors.Code.INTERNAL))


def too_large(limit_bytes: int) -> ErrorResponse:
    return ErrorResponse(413, str(errors.Code.PAYLOAD_TOO_LARGE), f"the body must have at most {limit_bytes} bytes")


def unknown_path(status: int, method: str, path: str) -> ErrorResponse:
    """Returns the response for a path that does not exist, or not with that method."""
    return ErrorResponse(status, "unknown_url", f"unknown URL: {method} {path[:200]}")
