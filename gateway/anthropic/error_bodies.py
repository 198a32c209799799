"""Errors in the form of Anthropic's API."""

import msgspec

from tokenbus.gateway.anthropic import schemas
from tokenbus.gateway.anthropic.turns import AnthropicFieldNames
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import errors

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = (errors.Code.OVERLOADED, errors.Code.INSUFFICIENT_MEMORY)
_NAMES = AnthropicFieldNames()
_encoder = msgspec.json.Encoder()


def status_of(response: ErrorResponse) -> int:
    """Returns Anthropic's status: it has its own for an overloaded server."""
    return 529 if response.status == 503 and response.code in _OVERLOADED else response.status


def type_of(response: ErrorResponse) -> str:
    """Returns Anthropic's error type."""
    status = status_of(response)
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def message_of(response: ErrorResponse) -> str:
    """Returns the text, by which agents recognize that their conversation has become too long."""
    if response.context_length is None or response.prompt_tokens is None:
        return response.message if response.param is None else _with_name_first(response.message, response.param)
    # At least one token must be left to generate.
    return f"prompt is too long: {response.prompt_tokens} tokens > {response.context_length - 1} maximum"


def to_body(response: ErrorResponse) -> schemas.AnthropicErrorBody:
    """Returns the body of an error response, which is also the data of an error event."""
    detail = schemas.AnthropicErrorDetail(type=type_of(response), message=message_of(response))
    return schemas.AnthropicErrorBody(error=detail, request_id=response.request_id)


def encode(response: ErrorResponse) -> bytes:
    """Returns the body as JSON."""
    return _encoder.encode(to_body(response))


def _with_name_first(message: str, param: str) -> str:
    """Returns an error's message with Anthropic's name of the field, a colon, and then the problem."""
    for begin in (f"{param}: ", f"{param} "):
        if message.startswith(begin):
            return f"{_NAMES.of(param)}: {message.removeprefix(begin)}"
    return message
