"""Chooses the form of an error by the request's path, for requests not answered by an endpoint."""

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from tokenbus.gateway.anthropic import error_bodies as anthropic
from tokenbus.gateway.anthropic import model_list
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.ollama import model_info as ollama
from tokenbus.gateway.openai import error_bodies as openai
from tokenbus.protocol.http.refusals import Headers, HttpRefusal

_RETRY_REFUSED_AFTER_MS = 1_000.0
_encoder = msgspec.json.Encoder()


class _Form(NamedTuple):
    error_body: Callable[[ErrorResponse], bytes]
    status_of: Callable[[ErrorResponse], int] = operator.attrgetter("status")


_OPENAI = _Form(openai.encode)
_ANTHROPIC = _Form(anthropic.encode, anthropic.status_of)
_OLLAMA = _Form(lambda response: _encoder.encode(ollama.OllamaError(error=response.message)))
_BY_PREFIX = {"/v1/messages/": _ANTHROPIC, "/api/": _OLLAMA}


def form_of(path: str, headers: Mapping[str, str]) -> _Form:
    """Returns the error form of the API to which a path belongs, or Anthropic's if a header asks for it."""
    for prefix, form in _BY_PREFIX.items():
        if f"{path}/".startswith(prefix):
            return form
    return _ANTHROPIC if model_list.is_wanted(headers) else _OPENAI


def refusal_response(refusal: HttpRefusal, path: str) -> tuple[int, Headers, bytes]:
    """Returns the status, headers and body of a refusal by the server itself; the path is empty if unknown."""
    is_full = refusal.status in (429, 503)
    response = ErrorResponse(
        refusal.status,
        refusal.code,
        refusal.message,
        retryable=is_full or refusal.status == 408,
        retry_after_ms=_RETRY_REFUSED_AFTER_MS if is_full else None,
    )
    form = form_of(path, {})
    headers = {"content-type": "application/json"} | response.headers
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return form.status_of(response), pairs, form.error_body(response)
