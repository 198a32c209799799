"""OpenAI's embeddings: turns their bodies into wire requests, and replies into responses."""

import base64
from collections.abc import Mapping
from typing import Literal

import msgspec

from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling

_encoder = msgspec.json.Encoder()


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an embedding request. Unknown fields are ignored, as OpenAI's clients expect."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    timeout_ms: float | None = None
    """Not OpenAI's; has the same meaning as on the wire."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: int
    """The index of the input, from 0."""
    embedding: list[float] | str
    """The numbers, or 32-bit little-endian floats in base64."""


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The response to an embedding request."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


_decoder = codec.Decoder(EmbeddingRequest)


class ParsedEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid embedding request."""

    model: str
    request: wire.EmbedRequest
    """It always asks for base64, which is a quarter of the numbers' length."""
    is_base64: bool

    def encode(self, reply: wire.EmbedReply) -> bytes:
        """Returns the body of the response."""
        rows = [row if self.is_base64 else _numbers(row) for row in reply.embeddings or []]
        data = [Embedding(index=number, embedding=row) for number, row in enumerate(rows)]
        tokens = reply.usage.prompt_tokens if reply.usage else 0
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        return _encoder.encode(EmbeddingList(data=data, model=self.model, usage=usage))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns the error: its field has the same name on the wire."""
        return error


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedEmbeddingRequest:
    """Parses a body, and validates it as a router would. Raises RequestError with OpenAI's name for the field at
    fault."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    model = checked_model(asked.model, default_model)
    request = wire.EmbedRequest(
        id=request_id,
        input=_inputs_of(asked.input),
        dimensions=asked.dimensions,
        encoding="base64",
        timeout_ms=asked.timeout_ms,
    )
    pooling.check_embed_request(request)
    return ParsedEmbeddingRequest(model=model, request=request, is_base64=asked.encoding_format == "base64")


def usage_of(reply: wire.EmbedReply) -> wire.Usage | None:
    """Returns the tokens of the inputs."""
    return reply.usage or None


def _numbers(row: list[float] | str) -> list[float] | str:
    return pooling.to_rows(base64.b64decode(row), 1, None)[0] if isinstance(row, str) else row


def _inputs_of(given: str | list[str | int | list[int]] | None) -> str | list[str | list[int]] | None:
    """Returns the inputs in the wire's form, in which token ids are in a separate list."""
    if not isinstance(given, list):
        return given
    token_ids = [one for one in given if isinstance(one, int)]
    if token_ids and len(token_ids) == len(given):
        return [token_ids]
    if token_ids:
        raise errors.invalid_field("input", "must be a text, texts, token ids, or lists of token ids")
    return [one for one in given if not isinstance(one, int)]
