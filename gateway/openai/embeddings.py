"""OpenAI's embeddings: turns their bodies into wire requests, and replies into responses."""

import functools
from typing import Literal

import msgspec

from tokenbus.client.wire.embedding import embed, numbers_of
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import NameOf
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RequestHead, UnservedField
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling

_LENGTH = "vectors have length 1"
_FLOATS = "numbers are 32-bit floats, little-endian in base64"
_PREFIX = "write the prefix that the model expects into the input"
_UNCUT = "an input that is too long is refused, never cut"


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an embedding request. Unknown fields are ignored, as OpenAI's clients expect."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    output_dimension: int | None = None
    """Mistral's and Voyage's name of `dimensions`."""
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

    id: str
    """Not OpenAI's: Mistral's clients need it."""
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def read(asked: EmbeddingRequest, head: RequestHead) -> ParsedCall[wire.EmbedRequest, wire.EmbedReply]:
    """Validates a body as a router would. Raises RequestError naming the field at fault."""
    request = wire.EmbedRequest(
        id=head.id,
        input=_inputs_of(asked.input),
        dimensions=_dimensions_of(asked),
        encoding="base64",  # a quarter of the numbers' length
        timeout_ms=asked.timeout_ms,
    )
    with http_errors.renaming(_name_of(asked)):
        pooling.check_embed_request(request)
    encode = functools.partial(_encode, head, is_base64=asked.encoding_format == "base64")
    return ParsedCall(
        model=head.model,
        request=request,
        send=embed,
        encode=encode,
        usage_of=lambda reply: reply.usage or None,
        name_of=_name_of(asked),
    )


ENDPOINT = ApiEndpoint(
    path="/v1/embeddings",
    feature="embed",
    summary="Embeddings",
    body=EmbeddingRequest,
    read=read,
    response=EmbeddingList,
    required=("input",),
    unserved={
        "add_special_tokens": UnservedField("use token ids", (None, True)),
        "content": UnservedField("use input"),
        "embd_normalize": UnservedField(_LENGTH, (None, 2)),
        "embed_dtype": UnservedField(_FLOATS, (None, "float32")),
        "embedding_type": UnservedField("use encoding_format", (None, "float")),
        "endianness": UnservedField(_FLOATS, (None, "little", "native")),
        "input_type": UnservedField(_PREFIX),
        "late_chunking": UnservedField("each input has a vector of its own", (None, False)),
        "lora_path": UnservedField("adapters are for models that generate"),
        "messages": UnservedField("use input"),
        "mm_processor_kwargs": UnservedField("only text is served", (None, {})),
        "modality": UnservedField("only text is served", (None, "text", ["text"])),
        "normalize": UnservedField(_LENGTH, (None, True)),
        "normalized": UnservedField(_LENGTH, (None, True)),
        "output_dtype": UnservedField(_FLOATS, (None, "float")),
        "padding": UnservedField("inputs are not padded", (None, "do_not_pad")),
        "task": UnservedField(_PREFIX),
        "truncate_prompt_tokens": UnservedField(_UNCUT),
        "use_activation": UnservedField(_LENGTH, (None, True)),
    },
    ignored={
        "cache_salt": "inputs are not cached",
        "priority": "inputs are computed in the order in which they come",
        "request_id": "the header X-Request-ID names requests",
        "rid": "the header X-Request-ID names requests",
        "truncate": _UNCUT,
        "truncation": _UNCUT,
        "truncation_side": "a parameter of truncate_prompt_tokens, which is refused",
        "user": "a name for abuse reports",
    },
)


def _encode(head: RequestHead, reply: wire.EmbedReply, *, is_base64: bool) -> bytes:
    rows = [row if is_base64 else numbers_of(row) for row in reply.embeddings or []]
    data = [Embedding(index=number, embedding=row) for number, row in enumerate(rows)]
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return msgspec.json.encode(EmbeddingList(id=f"embd-{head.id}", data=data, model=head.model, usage=usage))


def _name_of(asked: EmbeddingRequest) -> NameOf:
    return http_errors.by_field({} if asked.output_dimension is None else {"dimensions": "output_dimension"})


def _dimensions_of(asked: EmbeddingRequest) -> int | None:
    if None not in (asked.dimensions, asked.output_dimension) and asked.dimensions != asked.output_dimension:
        raise errors.invalid_field("output_dimension", f"is another name of dimensions, which is {asked.dimensions}")
    return asked.output_dimension if asked.dimensions is None else asked.dimensions


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
