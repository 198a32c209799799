"""Checks a request for embeddings field by field, and writes the vectors as the client wants them."""

import base64
import sys
from array import array

from tokenbus.protocol.wire import errors, internal, limits, messages
from tokenbus.protocol.wire.validation import Range, check_id

_TIMEOUT_MS = Range(0, 1e12, above=True)
DEFAULT_TIMEOUT_MS = 60_000.0
_FLOAT_BYTES = 4


def check_request(request: messages.EmbedRequest) -> internal.Embed:
    """What a worker is asked. Raises RequestError(invalid_request), naming the field and what it may be."""
    check_id(request.id)
    if request.timeout_ms is not None and not _TIMEOUT_MS.contains(request.timeout_ms):
        raise _invalid("timeout_ms", f"must be {_TIMEOUT_MS}")
    work = internal.Embed(
        inputs=[request.input] if isinstance(request.input, str) else request.input or [],
        dimensions=request.dimensions,
        normalize=request.normalize is not False,
        remaining_ms=request.timeout_ms or DEFAULT_TIMEOUT_MS,
    )
    check_embed(work)
    return work


def check_embed(work: internal.Embed) -> None:
    """What a worker holds a router's words against. Raises RequestError(invalid_request) in the same way."""
    if not work.remaining_ms <= _TIMEOUT_MS.high:
        raise _invalid("remaining_ms", f"must be at most {_TIMEOUT_MS.high:.12g}")
    if work.dimensions is not None and work.dimensions < 1:
        raise _invalid("dimensions", f"must be at least 1, got {work.dimensions}")
    if not 1 <= len(work.inputs) <= limits.MAX_EMBED_INPUTS:
        raise _invalid("input", f"must be a text, or 1 to {limits.MAX_EMBED_INPUTS} texts or lists of token ids")
    for place, one in enumerate(work.inputs):
        _check_input(one, f"input[{place}]")


def to_rows(vectors: bytes, count: int, encoding: str | None) -> list[list[float] | str]:
    """One for each of `count` inputs, from 32-bit little-endian numbers: as numbers, or those bytes in base64."""
    size = len(vectors) // count
    assert size * count == len(vectors), (len(vectors), count)
    rows = [vectors[start : start + size] for start in range(0, len(vectors), size)]
    if encoding == "base64":
        return [base64.b64encode(row).decode() for row in rows]
    return [_floats(row) for row in rows]


def _floats(row: bytes) -> list[float]:
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _check_input(one: str | list[int], param: str) -> None:
    if not one:
        raise _invalid(param, "must not be empty")
    if isinstance(one, list) and not 0 <= min(one) <= max(one) <= limits.MAX_TOKEN_ID:
        raise _invalid(param, f"token ids must be 0 to {limits.MAX_TOKEN_ID}")


def _invalid(param: str, problem: str) -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, f"{param}: {problem}", param=param)
