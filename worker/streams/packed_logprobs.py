"""Packs the log probabilities of a completion for other workers.

Each token takes a record of 12 bytes for itself and one for each of the likeliest tokens at its position, so that
packed tokens can be put together, and cut apart, without being read:

    token 0: own | likeliest | second | ...     token 1: own | likeliest | ...     a record: id (4 bytes) | logprob (8)
"""

import functools
import itertools
import struct
from collections.abc import Iterable

from tokenbus.worker.contract import engine_output


@functools.cache
def _token(num_alternatives: int) -> struct.Struct:
    return struct.Struct("<" + "Id" * (1 + num_alternatives))


def num_bytes(num_alternatives: int) -> int:
    """Returns the size of a token with that many alternatives."""
    return _token(num_alternatives).size


def pack(logprobs: Iterable[engine_output.Logprob], num_alternatives: int) -> bytes:
    """Packs log probabilities, with the likeliest `num_alternatives` of each. Raises struct.error if one has fewer."""
    pack_token = _token(num_alternatives).pack
    return b"".join(
        [
            pack_token(one.token_id, one.logprob, *itertools.chain.from_iterable(one.top[:num_alternatives]))
            for one in logprobs
        ]
    )


def unpack(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Reverses `pack` for tokens with `num_alternatives` each."""
    return [
        engine_output.Logprob(token_id, logprob, list(zip(rest[::2], rest[1::2], strict=True)))
        for token_id, logprob, *rest in _token(num_alternatives).iter_unpack(data)
    ]


def unpack_foreign(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Unpacks what another worker says that it has packed. Raises ValueError if that can't be."""
    if len(data) % num_bytes(num_alternatives):
        raise ValueError(f"{len(data)} bytes are not log probabilities with {num_alternatives} alternatives each")
    logprobs = unpack(data, num_alternatives)
    # no probability is above 1; written so that NaN is refused
    if not all(logprob <= 0 for one in logprobs for _, logprob in ((one.token_id, one.logprob), *one.top)):
        raise ValueError("a log probability is above 0")
    return logprobs
