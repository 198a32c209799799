"""Errors in the form of OpenAI's API."""

import msgspec

from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import schemas
from tokenbus.protocol.wire import errors

_CODES = {
    str(errors.Code.PROMPT_TOO_LONG): "context_length_exceeded",
    str(errors.Code.UNAUTHORIZED): "invalid_api_key",
    str(errors.Code.OVERLOADED): "rate_limit_exceeded",
}
"""OpenAI's names for codes on which its clients act."""
_encoder = msgspec.json.Encoder()


def type_of(response: ErrorResponse) -> str:
    """Returns OpenAI's error type."""
    if response.status == 429:
        return "rate_limit_error"
    return "server_error" if response.status >= 500 else "invalid_request_error"


def code_of(response: ErrorResponse) -> str:
    """Returns the code by the name that OpenAI's clients look for."""
    if response.status == 503 and response.code == errors.Code.OVERLOADED:
        return response.code  # the gateway's own limit, not one of the client's
    return _CODES.get(response.code, response.code)


def message_of(response: ErrorResponse) -> str:
    """Returns the text, by which agents recognize that their conversation has become too long."""
    if response.context_length is None or response.prompt_tokens is None:
        return response.message
    given = response.param or "messages"
    return (
        f"This model's maximum context length is {response.context_length} tokens. However, your {given} resulted in "
        f"{response.prompt_tokens} tokens. Please reduce the length of the {given}."
    )


def encode(response: ErrorResponse) -> bytes:
    """Returns the body of an error response, which is also the data of an error event."""
    detail = schemas.ErrorDetail(
        message=message_of(response), type=type_of(response), param=response.param, code=code_of(response)
    )
    return _encoder.encode(schemas.ErrorBody(error=detail))
