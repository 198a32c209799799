"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`, with llama-server's fields of the first: turns their bodies
into wire requests, and replies into responses."""

import functools
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai.chat import IGNORED_IN_MESSAGES, IN_MESSAGES, OpenAIChatMessage, continuation_of
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RequestHead, UnservedField
from tokenbus.protocol.wire import errors
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
    add_generation_prompt: bool | None = None
    """Whether a conversation ends with the beginning of an answer. true if absent."""
    content: str | None = None
    """llama-server's `prompt`, to which BOS is added only with `add_special`."""
    add_special: bool | None = None
    with_pieces: bool | None = None
    """llama-server's: each token is an object with its `id` and its `piece`."""
    continue_final_message: bool | None = None
    """Whether a conversation ends in the middle of its last message, an assistant's."""


class PieceOfPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A token in llama-server's form."""

    id: int
    piece: str | list[int]
    """Its text, or its bytes if these are no whole characters."""


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    """The maximum number of tokens of a prompt and its completion together."""
    tokens: list[int | PieceOfPrompt]
    token_strs: list[str] | None = None
    """The text of each token, if requested."""


class TokenizerInfoBody(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a request for the tokenizer's properties."""

    model: str | None = None


class TokenizerInfoResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model's tokenizer."""

    tokenizer_class: str = "tokenbus"
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int
    """The maximum number of tokens of a prompt and its completion together."""


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a detokenize request. Unknown fields are ignored."""

    model: str | None = None
    tokens: list[int] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens."""

    prompt: str
    content: str
    """The same under llama-server's name."""


class TokenizedPrompt(NamedTuple):
    """The tokens of a prompt, and each by itself if that was asked for."""

    reply: wire.TokenizeReply
    pieces: list[wire.TokenPiece] = []


def read_tokenize(asked: TokenizeBody, head: RequestHead) -> ParsedCall[wire.TokenizeRequest, TokenizedPrompt]:
    """Validates a body as a router would. Raises RequestError with vLLM's name for the field at fault."""
    said = None
    if asked.messages is not None:
        said = conversation.normalized([one.to_wire() for one in asked.messages])
    continued = continuation_of(
        asked.messages or [], asked=asked.continue_final_message, begins_answer=asked.add_generation_prompt
    )
    prompt, adds_bos, variables = asked.prompt, asked.add_special_tokens, asked.chat_template_kwargs
    if asked.content is not None:
        if prompt is not None:
            raise errors.invalid_field("content", "is another name of prompt: give one of them")
        prompt, adds_bos = asked.content, bool(asked.add_special)
    if asked.add_generation_prompt is not None and said is not None and not continued:
        variables = (variables or {}) | {"add_generation_prompt": asked.add_generation_prompt}
    request = wire.TokenizeRequest(
        id=head.id,
        prompt=prompt,
        messages=said,
        tools=asked.tools,
        chat_template_kwargs=variables,
        continue_final_message=True if continued else None,
        add_special_tokens=adds_bos,
        only_count=asked.only_count,
    )
    name_of = conversation.given_names(continued, num_joined=len(asked.messages or []) - len(said or []))
    with http_errors.renaming(name_of):
        validation.check_tokenize_request(request)
    return ParsedCall(
        model=head.model,
        request=request,
        send=_tokenize_with_pieces if asked.return_token_strs or asked.with_pieces else _tokenize,
        encode=functools.partial(_encode_tokens, asked),
        name_of=name_of,
    )


async def _tokenize(client: WireClient, model: str, request: wire.TokenizeRequest) -> TokenizedPrompt:
    return TokenizedPrompt(await client.tokenize(model, request))


async def _tokenize_with_pieces(client: WireClient, model: str, request: wire.TokenizeRequest) -> TokenizedPrompt:
    reply = await client.tokenize(model, request)
    if not reply.token_ids:
        return TokenizedPrompt(reply)
    asked = wire.DetokenizeRequest(token_ids=reply.token_ids, return_pieces=True, timeout_ms=request.timeout_ms)
    return TokenizedPrompt(reply, (await client.detokenize(model, asked)).pieces or [])


def read_tokenizer_info(
    asked: TokenizerInfoBody, head: RequestHead
) -> ParsedCall[wire.TokenizeRequest, wire.TokenizeReply]:
    """Returns the call for the properties of the tokenizer of the model that the query names."""
    request = wire.TokenizeRequest(id=head.id, prompt="", only_count=True, return_tokenizer=True)
    return ParsedCall(model=head.model, request=request, send=WireClient.tokenize, encode=_encode_info)


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
        "chat_template": UnservedField("only the model's own is served"),
        "parse_special": UnservedField("special tokens in a text are never parsed", (None, False)),
        "mm_processor_kwargs": UnservedField("only text is served", (None, {})),
        "media_io_kwargs": UnservedField("only text is served", (None, {})),
    }
    | IN_MESSAGES,
    ignored=IGNORED_IN_MESSAGES,
)
TOKENIZER_INFO = ApiEndpoint(
    path="/tokenizer_info",
    method="GET",
    feature="",
    summary="The properties of a tokenizer",
    body=TokenizerInfoBody,
    read=read_tokenizer_info,
    response=TokenizerInfoResponse,
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
    unserved={"skip_special_tokens": UnservedField("special tokens have no text", (None, True))},
)


def _encode_tokens(asked: TokenizeBody, tokens: TokenizedPrompt) -> bytes:
    reply, pieces = tokens
    token_ids = reply.token_ids or []
    shown: list[int | PieceOfPrompt] = [*token_ids]
    if asked.with_pieces:
        shown = [
            PieceOfPrompt(id=token_id, piece=_piece_of(one)) for token_id, one in zip(token_ids, pieces, strict=True)
        ]
    return msgspec.json.encode(
        TokenizeResponse(
            count=reply.count or 0,
            max_model_len=reply.context_length or 0,
            tokens=shown,
            token_strs=[one.text for one in pieces] if asked.return_token_strs else None,
        )
    )


def _piece_of(token: wire.TokenPiece) -> str | list[int]:
    return token.text if list(token.text.encode()) == token.bytes else token.bytes


def _encode_info(reply: wire.TokenizeReply) -> bytes:
    info = reply.tokenizer
    if info is UNSET:
        raise errors.request_error(
            errors.Code.UNSUPPORTED, "the model's tokenizer is known only to its workers", param="model"
        )
    return msgspec.json.encode(
        TokenizerInfoResponse(
            vocab_size=info.vocab_size,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            add_bos_token=info.adds_bos,
            chat_template=info.chat_template,
            model_max_length=reply.context_length or 0,
        )
    )


def _encode_text(reply: wire.DetokenizeReply) -> bytes:
    text = reply.text or ""
    return msgspec.json.encode(DetokenizeResponse(prompt=text, content=text))
