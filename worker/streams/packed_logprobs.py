"""Packs the log probabilities of a completion for other workers.

Each token takes a record of 12 bytes for itself and one for each of the likeliest tokens at its position, so that
packed tokens can be put together, and cut apart, without being read:

    token 0: own | likeliest | second | ...     token 1: own | likeliest | ...     a record: id (4 bytes) | logprob (8)
"""

import struct
from collections.abc import Iterable

from tokenbus.worker.contract import engine_output

_RECORD = struct.Struct("<Id")


def pack(logprobs: Iterable[engine_output.Logprob]) -> bytes:
    """Packs log probabilities; all of them must have the same number of alternatives."""
    return b"".join(
        _RECORD.pack(token_id, logprob)
        for one in logprobs
        for token_id, logprob in ((one.token_id, one.logprob), *one.top)
    )


def unpack(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Reverses `pack` for tokens with `num_alternatives` each. Raises ValueError for malformed data."""
    width = 1 + num_alternatives
    if len(data) % (width * _RECORD.size):
        raise ValueError(f"{len(data)} bytes are not log probabilities with {num_alternatives} alternatives each")
    records: list[tuple[int, float]] = list(_RECORD.iter_unpack(data))
    # no probability is above 1; written so that NaN is refused
    if not all(logprob <= 0 for _, logprob in records):
        raise ValueError("a log probability is above 0")
    return [
        engine_output.Logprob(token_id, logprob, records[at + 1 : at + width])
        for at, (token_id, logprob) in enumerate(records)
        if at % width == 0
    ]
