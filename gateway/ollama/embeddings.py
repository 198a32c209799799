"""Ollama's embeddings: turns their bodies into wire requests, and replies into responses."""

import functools
from typing import Any

import msgspec

from tokenbus.client.wire.embedding import embed, numbers_of
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.ollama import options
from tokenbus.gateway.ollama.options import Options
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RequestHead
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    options: Options | None = None
    """Without effect on embeddings."""
    keep_alive: float | str | None = None
    """The time for which the model stays loaded. Here its operator decides that."""
    timeout_ms: float | None = None
    """Not Ollama's; has the same meaning as on the wire."""


class OllamaEmbedRequest(_Body, frozen=True, kw_only=True):
    """The body of `/api/embed`. Unknown fields are ignored."""

    input: str | list[str] | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    """Without effect: an input that is too long is refused, and never cut."""


class OllamaEmbeddingsRequest(_Body, frozen=True, kw_only=True):
    """The body of the older `/api/embeddings`. Unknown fields are ignored."""

    prompt: str | None = None


class OllamaEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    """Nanoseconds since the request was received."""
    load_duration: int = 0
    """Always 0: how long a model took to load is not known here."""
    prompt_eval_count: int
    """Tokens of all inputs."""


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True, kw_only=True):
    embedding: list[float]


def read_embed(asked: OllamaEmbedRequest, head: RequestHead) -> ParsedCall[wire.EmbedRequest, wire.EmbedReply]:
    """Validates a body as a router would. Raises RequestError naming the field at fault."""
    given = asked.input if isinstance(asked.input, str | None) else list[str | list[int]](asked.input)
    encode = functools.partial(_encode, head.model)
    request = wire.EmbedRequest(id=head.id, input=given, dimensions=asked.dimensions)
    parsed = _parsed(asked, head, request, "input", encode)
    return msgspec.structs.replace(parsed, encode_timed=encode)


def read_embeddings(
    asked: OllamaEmbeddingsRequest, head: RequestHead
) -> ParsedCall[wire.EmbedRequest, wire.EmbedReply]:
    """Validates a body as a router would. Raises RequestError naming the field at fault."""
    return _parsed(asked, head, wire.EmbedRequest(id=head.id, input=asked.prompt), "prompt", _encode_one)


def _parsed(
    asked: _Body, head: RequestHead, request: wire.EmbedRequest, input_name: str, encode: Any
) -> ParsedCall[wire.EmbedRequest, wire.EmbedReply]:
    options.check_keep_alive(asked.keep_alive)
    name_of = http_errors.by_field({"input": input_name})
    request = msgspec.structs.replace(
        request, encoding="base64", timeout_ms=asked.timeout_ms
    )  # a quarter of the numbers' length
    with http_errors.renaming(name_of):
        pooling.check_embed_request(request)
    return ParsedCall(
        model=options.untagged(head.model),
        request=request,
        send=embed,
        encode=encode,
        usage_of=lambda reply: reply.usage or None,
        name_of=name_of,
    )


_IGNORED = {"keep_alive": options.IGNORED["keep_alive"], "options": "they are about sampling and loading"}
EMBED = ApiEndpoint(
    path="/api/embed",
    feature="embed",
    summary="Embeddings in Ollama's form",
    body=OllamaEmbedRequest,
    read=read_embed,
    response=OllamaEmbedResponse,
    required=("input",),
    ignored=_IGNORED | {"truncate": options.IGNORED["truncate"]},
)
EMBEDDINGS = ApiEndpoint(
    path="/api/embeddings",
    feature="embed",
    summary="One embedding in Ollama's older form",
    body=OllamaEmbeddingsRequest,
    read=read_embeddings,
    response=OllamaEmbeddingsResponse,
    required=("prompt",),
    ignored=_IGNORED,
)


def _encode(model: str, reply: wire.EmbedReply, age_s: float = 0.0) -> bytes:
    return msgspec.json.encode(
        OllamaEmbedResponse(
            model=model,
            embeddings=_rows(reply),
            total_duration=round(1e9 * age_s),
            prompt_eval_count=reply.usage.prompt_tokens if reply.usage else 0,
        )
    )


def _encode_one(reply: wire.EmbedReply) -> bytes:
    return msgspec.json.encode(OllamaEmbeddingsResponse(embedding=_rows(reply)[0]))


def _rows(reply: wire.EmbedReply) -> list[list[float]]:
    return [numbers_of(row) for row in reply.embeddings or []]
