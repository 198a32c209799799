"""vLLM's `/tokenize` and `/detokenize`: turns their bodies into wire requests, and replies into responses."""

from typing import Any

import msgspec

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai.chat import OpenAIChatMessage
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RequestHead, UnservedField
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a tokenize request. Unknown fields are ignored."""

    model: str | None = None
    prompt: str | None = None
    messages: list[OpenAIChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether BOS comes first if the model expects it. true if absent."""
    only_count: bool | None = None
    """Not vLLM's: leaves `tokens` empty."""
    return_token_strs: bool | None = None
    """This field and those below are refused if they ask for anything that is not served."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    """The maximum number of tokens of a prompt and its completion together."""
    tokens: list[int]
    token_strs: None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a detokenize request. Unknown fields are ignored."""

    model: str | None = None
    tokens: list[int] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens."""

    prompt: str


def read_tokenize(asked: TokenizeBody, head: RequestHead) -> ParsedCall[wire.TokenizeRequest, wire.TokenizeReply]:
    """Validates a body as a router would. Raises RequestError with vLLM's name for the field at fault."""
    said = None
    if asked.messages is not None:
        said = conversation.normalized([one.to_wire() for one in asked.messages])
    request = wire.TokenizeRequest(
        id=head.id,
        prompt=asked.prompt,
        messages=said,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_special_tokens=asked.add_special_tokens,
        only_count=asked.only_count,
    )
    name_of = conversation.given_names({}, num_joined=len(asked.messages or []) - len(said or []))
    with http_errors.renaming(name_of):
        validation.check_tokenize_request(request)
    return ParsedCall(
        model=head.model, request=request, send=WireClient.tokenize, encode=_encode_tokens, name_of=name_of
    )


def read_detokenize(
    asked: DetokenizeBody, head: RequestHead
) -> ParsedCall[wire.DetokenizeRequest, wire.DetokenizeReply]:
    """Validates a body as a router would. Raises RequestError with vLLM's name for the field at fault."""
    request = wire.DetokenizeRequest(id=head.id, token_ids=asked.tokens)
    name_of = http_errors.by_field({"token_ids": "tokens"})
    with http_errors.renaming(name_of):
        validation.check_detokenize_request(request)
    return ParsedCall(
        model=head.model, request=request, send=WireClient.detokenize, encode=_encode_text, name_of=name_of
    )


TOKENIZE = ApiEndpoint(
    path="/tokenize",
    feature="",
    summary="The tokens of a prompt",
    body=TokenizeBody,
    read=read_tokenize,
    response=TokenizeResponse,
    unserved={
        "return_token_strs": UnservedField("only False is served", (None, False)),
        "add_generation_prompt": UnservedField("only True is served", (None, True)),
        "continue_final_message": UnservedField("only False is served", (None, False)),
        "chat_template": UnservedField("only the model's own is served"),
    },
)
DETOKENIZE = ApiEndpoint(
    path="/detokenize",
    feature="",
    summary="The text of tokens",
    body=DetokenizeBody,
    read=read_detokenize,
    response=DetokenizeResponse,
    required=("tokens",),
    may_be_empty=("tokens",),
)


def _encode_tokens(reply: wire.TokenizeReply) -> bytes:
    return msgspec.json.encode(
        TokenizeResponse(count=reply.count or 0, max_model_len=reply.context_length or 0, tokens=reply.token_ids or [])
    )


def _encode_text(reply: wire.DetokenizeReply) -> bytes:
    return msgspec.json.encode(DetokenizeResponse(prompt=reply.text or ""))
