"""Counts the tokens of a conversation's prompt, for the endpoints that answer with their number alone."""

import msgspec

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.http.http_errors import NameOf
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.dialect import ParsedCall
from tokenbus.protocol.wire import messages as wire

CountCall = ParsedCall[wire.TokenizeRequest, wire.TokenizeReply]


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The response: how many tokens a model would read."""

    input_tokens: int
    object: str = "response.input_tokens"


def counting(model: str, request: wire.GenerateRequest, name_of: NameOf) -> CountCall:
    """Returns the call that counts the tokens of a valid request."""
    return ParsedCall(
        model=model,
        request=conversation.prompt_of(request, only_count=True),
        send=WireClient.tokenize,
        encode=lambda reply: msgspec.json.encode(InputTokens(input_tokens=reply.count or 0)),
        name_of=name_of,
    )
