"""Turns the body of a request to count tokens into one of the wire, and the reply into Anthropic's; pure."""

from collections.abc import Mapping

import msgspec

from tokenbus.gateway.anthropic import messages_request, schemas
from tokenbus.gateway.anthropic.field_names import FieldNames, with_name_first
from tokenbus.gateway.generation import conversation
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages as wire

_encoder = msgspec.json.Encoder()


class CountTokensRequest(messages_request.MessagesRequest, frozen=True, kw_only=True):
    """The body: that of a message, of which what only an answer needs may be left out."""


class ParsedCount(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for the number of tokens of a conversation."""

    model: str
    request: wire.TokenizeRequest
    names: FieldNames

    def encode(self, reply: wire.TokenizeReply) -> bytes:
        """Returns the body of the response."""
        return _encoder.encode(schemas.MessageTokensCount(input_tokens=reply.count or 0))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns an error of a router or worker with Anthropic's name of the field at fault."""
        return http_errors.renamed(error, self.names.of, with_name_first)


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedCount:
    """Parses a body, and validates it as one that asks for a message. Raises RequestError with Anthropic's name of the
    field at fault."""
    asked, request, names = messages_request.to_wire(body, headers, request_id, default_model)
    return ParsedCount(model=asked.model or "", request=conversation.counting(request), names=names)
