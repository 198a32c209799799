"""vLLM's `/tokenize` and `/detokenize`: turns their bodies into wire requests, and replies into responses."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai.chat_request import OpenAIChatMessage, to_wire_message
from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

_encoder = msgspec.json.Encoder()


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


_UNSERVED: dict[str, object] = {
    "return_token_strs": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
}
_detokenize_name_of = http_errors.by_field({"token_ids": "tokens"})
_tokenize_decoder = codec.Decoder(TokenizeBody)
_detokenize_decoder = codec.Decoder(DetokenizeBody)


class ParsedTokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A valid tokenize request."""

    model: str
    request: wire.TokenizeRequest
    num_joined: int
    """The number of messages that the body has beyond the request."""

    def encode(self, reply: wire.TokenizeReply) -> bytes:
        """Returns the body of the response."""
        return _encoder.encode(
            TokenizeResponse(
                count=reply.count or 0, max_model_len=reply.context_length or 0, tokens=reply.token_ids or []
            )
        )

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with vLLM's name for the field at fault."""
        return http_errors.renamed(error, self.name_of)

    def name_of(self, param: str) -> str:
        """Returns vLLM's name for a field."""
        return conversation.name_in_given(param, self.num_joined)


class ParsedDetokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A valid detokenize request."""

    model: str
    request: wire.DetokenizeRequest

    def encode(self, reply: wire.DetokenizeReply) -> bytes:
        """Returns the body of the response."""
        return _encoder.encode(DetokenizeResponse(prompt=reply.text or ""))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with vLLM's name for the field at fault."""
        return http_errors.renamed(error, _detokenize_name_of)


def parse_tokenize(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedTokenize:
    """Parses a body, and validates it as a router would. Raises RequestError with vLLM's name for the field at
    fault."""
    asked = _tokenize_decoder.decode(body, codec.Encoding.JSON)
    model = checked_model(asked.model, default_model)
    for name, refused in _UNSERVED.items():
        if getattr(asked, name) is refused:
            raise errors.request_error(errors.Code.UNSUPPORTED, f"{name}: only {not refused} is served", param=name)
    if asked.chat_template is not None:
        problem = "chat_template: only the model's own is served"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="chat_template")
    said = None
    if asked.messages is not None:
        said = conversation.normalized([to_wire_message(one) for one in asked.messages])
    request = wire.TokenizeRequest(
        id=request_id,
        prompt=asked.prompt,
        messages=said,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_special_tokens=asked.add_special_tokens,
        only_count=asked.only_count,
    )
    num_joined = len(asked.messages or []) - len(said or [])
    parsed = ParsedTokenize(model=model, request=request, num_joined=num_joined)
    with http_errors.renaming(parsed.name_of):
        validation.check_tokenize_request(request)
    return parsed


def parse_detokenize(
    body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = ""
) -> ParsedDetokenize:
    """Parses a body, and validates it as a router would. Raises RequestError with vLLM's name for the field at
    fault."""
    asked = _detokenize_decoder.decode(body, codec.Encoding.JSON)
    model = checked_model(asked.model, default_model)
    request = wire.DetokenizeRequest(id=request_id, token_ids=asked.tokens)
    with http_errors.renaming(_detokenize_name_of):
        validation.check_detokenize_request(request)
    return ParsedDetokenize(model=model, request=request)
