"""The log probabilities of a prompt's tokens, packed: an engine makes thousands at a time, and a stream keeps them.

Each token takes a record, with the same number of likeliest tokens in all records of a prompt:

    id (4 bytes) | logprob (4) | rank (4) | id (4) | logprob (4) | id | logprob | ...

The first token of a prompt has the log probability NaN and the rank 0, since no token comes before it.
"""

import functools
import math
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ScoredToken(NamedTuple):
    """A token of a prompt, and the likeliest tokens at its position."""

    token_id: int
    logprob: float | None
    """The natural logarithm of its probability; None for the first token."""
    rank: int | None
    """Its place among all tokens, the likeliest being 1."""
    top: list[tuple[int, float]]


@functools.cache
def _record(num_alternatives: int) -> struct.Struct:
    return struct.Struct("<IfI" + "If" * num_alternatives)


def record_bytes(num_alternatives: int) -> int:
    """Returns the size of a token's record."""
    return _record(num_alternatives).size


def pack(token_id: int, logprob: float, rank: int, top: Iterable[tuple[int, float]]) -> bytes:
    """Returns the record of a token that others precede."""
    flat = [number for pair in top for number in pair]
    return _record(len(flat) // 2).pack(token_id, logprob, rank, *flat)


def pack_first(token_id: int, num_alternatives: int) -> bytes:
    """Returns the record of a prompt's first token."""
    return _record(num_alternatives).pack(token_id, math.nan, 0, *(0, math.nan) * num_alternatives)


def unpack(data: bytes, num_alternatives: int) -> Iterator[ScoredToken]:
    """Yields the tokens of whole records."""
    for token_id, logprob, rank, *rest in _record(num_alternatives).iter_unpack(data):
        if not rank:
            yield ScoredToken(token_id, None, None, [])
        else:
            yield ScoredToken(token_id, logprob, rank, list(zip(rest[::2], rest[1::2], strict=True)))
