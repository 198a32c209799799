"""Validates requests for embeddings and ranked documents, and makes their answers from a worker's numbers."""

import base64
import sys
from array import array

from tokenbus.protocol.wire import internal, limits, messages
from tokenbus.protocol.wire.checks.validation import check_id, check_ranges
from tokenbus.protocol.wire.errors import invalid_field


def check_embed_request(request: messages.EmbedRequest) -> internal.Embed:
    """Returns the message for a worker. Raises RequestError for the first field that is not allowed."""
    check_id(request.id)
    check_ranges(request)
    work = internal.Embed(
        inputs=[request.input] if isinstance(request.input, str) else request.input or [],
        dimensions=request.dimensions,
        normalize=request.normalize is not False,
        remaining_ms=request.timeout_ms or limits.DEFAULT_CALL_TIMEOUT_MS,
    )
    check_embed(work)
    return work


def check_embed(work: internal.Embed) -> None:
    """Raises RequestError for the first field of a router's message that is not allowed."""
    check_ranges(work)
    if not 1 <= len(work.inputs) <= limits.MAX_EMBED_INPUTS:
        raise invalid_field(
            "input", f"must be a string, or 1 to {limits.MAX_EMBED_INPUTS} strings or lists of token ids"
        )
    for index, one in enumerate(work.inputs):
        if not one:
            raise invalid_field(f"input[{index}]", "must not be empty")
        if isinstance(one, list) and not 0 <= min(one) <= max(one) <= limits.MAX_TOKEN_ID:
            raise invalid_field(f"input[{index}]", f"token ids must be 0 to {limits.MAX_TOKEN_ID}")


def check_rerank_request(request: messages.RerankRequest) -> internal.Rerank:
    """Returns the message for a worker. Raises RequestError for the first field that is not allowed."""
    check_id(request.id)
    check_ranges(request)
    work = internal.Rerank(
        query=request.query or "",
        documents=request.documents or [],
        remaining_ms=request.timeout_ms or limits.DEFAULT_CALL_TIMEOUT_MS,
    )
    check_rerank(work)
    return work


def check_rerank(work: internal.Rerank) -> None:
    """Raises RequestError for the first field of a router's message that is not allowed."""
    check_ranges(work)
    if not work.query:
        raise invalid_field("query", "must not be empty")
    if not 1 <= len(work.documents) <= limits.MAX_RERANK_DOCUMENTS:
        raise invalid_field("documents", f"must be 1 to {limits.MAX_RERANK_DOCUMENTS} strings")
    for index, document in enumerate(work.documents):
        if not document:
            raise invalid_field(f"documents[{index}]", "must not be empty")


def to_rows(vectors: bytes, count: int, encoding: str | None) -> list[list[float] | str]:
    """Splits packed 32-bit little-endian floats into `count` rows: lists of numbers, or those bytes in base64."""
    size = len(vectors) // count
    assert size * count == len(vectors), (len(vectors), count)
    rows = [vectors[start : start + size] for start in range(0, len(vectors), size)]
    if encoding == "base64":
        return [base64.b64encode(row).decode() for row in rows]
    return [_floats(row) for row in rows]


def rank(scores: bytes, top_n: int | None) -> list[messages.RankedDocument]:
    """Returns the first `top_n` documents in the order of their scores, which are packed 32-bit floats."""
    ranked = sorted(enumerate(_floats(scores)), key=lambda one: -one[1])
    return [messages.RankedDocument(index=index, relevance_score=score) for index, score in ranked[:top_n]]


def _floats(row: bytes) -> list[float]:
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
