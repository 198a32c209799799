"""Turns the body of a token-counting request into a wire request, and the reply into Anthropic's."""

from collections.abc import Mapping

import msgspec

from tokenbus.gateway.anthropic import messages_request, schemas
from tokenbus.gateway.anthropic.field_names import AnthropicFieldNames, with_name_first
from tokenbus.gateway.generation import conversation
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages as wire

_encoder = msgspec.json.Encoder()


class CountTokensRequest(messages_request.MessagesRequest, frozen=True, kw_only=True):
    """The body: that of a message request, without the fields that only matter for an answer."""


class ParsedMessageCount(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for the number of tokens of a conversation."""

    model: str
    request: wire.TokenizeRequest
    names: AnthropicFieldNames

    def encode(self, reply: wire.TokenizeReply) -> bytes:
        """Returns the body of the response."""
        return _encoder.encode(schemas.MessageTokensCount(input_tokens=reply.count or 0))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with Anthropic's name for the field at fault."""
        return http_errors.renamed(error, self.names.of, with_name_first)


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedMessageCount:
    """Parses a body, and validates it like a message request's. Raises RequestError with Anthropic's name for the field
    at fault."""
    asked, request, names = messages_request.to_wire(body, headers, request_id, default_model)
    return ParsedMessageCount(model=asked.model or "", request=conversation.counting(request), names=names)
