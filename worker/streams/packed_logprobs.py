"""Packs the log probabilities of a completion for other workers.

Each token takes a record of 12 bytes for itself and one for each of the likeliest tokens at its position, so that
packed tokens can be put together, and cut apart, without being read:

    token 0: own | likeliest | second | ...     token 1: own | likeliest | ...     a record: id (4 bytes) | logprob (8)
"""

import struct
from collections.abc import Sequence

from tokenbus.worker.contract import engine_output

_RECORD = struct.Struct("<Id")


def num_bytes(num_alternatives: int) -> int:
    """Returns the size of a token with that many alternatives."""
    return (1 + num_alternatives) * _RECORD.size


def pack(logprobs: Sequence[engine_output.Logprob], num_alternatives: int) -> bytes:
    """Packs log probabilities, with the likeliest `num_alternatives` of each, which must have as many."""
    assert all(len(one.top) >= num_alternatives for one in logprobs), logprobs
    return b"".join(
        _RECORD.pack(token_id, logprob)
        for one in logprobs
        for token_id, logprob in ((one.token_id, one.logprob), *one.top[:num_alternatives])
    )


def unpack_foreign(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Unpacks what another worker says that it has packed. Raises ValueError if that can't be."""
    if len(data) % num_bytes(num_alternatives):
        raise ValueError(f"{len(data)} bytes are not log probabilities with {num_alternatives} alternatives each")
    # no probability is above 1; written so that NaN is refused
    if not all(logprob <= 0 for _, logprob in _RECORD.iter_unpack(data)):
        raise ValueError("a log probability is above 0")
    return unpack(data, num_alternatives)


def unpack(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Reverses `pack` for tokens with `num_alternatives` each."""
    width = 1 + num_alternatives
    records: list[tuple[int, float]] = list(_RECORD.iter_unpack(data))
    return [
        engine_output.Logprob(token_id, logprob, records[at + 1 : at + width])
        for at, (token_id, logprob) in enumerate(records)
        if at % width == 0
    ]
