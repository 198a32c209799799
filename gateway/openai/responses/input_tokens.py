"""Turns the body of a request to count a response's input into a wire request, and the reply into OpenAI's."""

from collections.abc import Mapping

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai.responses import request as responses_request
from tokenbus.gateway.openai.responses.body import ResponsesBody
from tokenbus.gateway.openai.responses.field_names import ResponsesFieldNames
from tokenbus.protocol.wire import messages as wire

_encoder = msgspec.json.Encoder()


class CountBody(ResponsesBody, frozen=True, kw_only=True):
    """The body: that of a response request."""


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The response: how many tokens a model would read."""

    input_tokens: int
    object: str = "response.input_tokens"


class ParsedInputCount(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for the number of tokens in an input."""

    model: str
    request: wire.TokenizeRequest
    names: ResponsesFieldNames

    def encode(self, reply: wire.TokenizeReply) -> bytes:
        """Returns the body of the response."""
        return _encoder.encode(InputTokens(input_tokens=reply.count or 0))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with OpenAI's name for the field at fault."""
        return http_errors.renamed(error, self.names.of)


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedInputCount:
    """Parses a body, and validates it like a response request's. Raises RequestError with OpenAI's name for the field
    at fault."""
    asked = responses_request.parse(body, headers, request_id, default_model)
    return ParsedInputCount(model=asked.model, request=conversation.counting(asked.request), names=asked.names)
