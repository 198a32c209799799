"""The chained hash that names a block of prompt tokens everywhere: `xxh3_64(parent, token ids)`.

    root hash --block 0--> hash 0 --block 1--> hash 1 --block 2--> hash 2

A block's hash depends on its tokens and on everything before them, so equal hashes mean equal prefixes, unless somebody
has searched for two that collide, which takes minutes. It is a hint for routing, not an identity: before a worker
reuses a block it compares the tokens.
"""

import functools
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tokenbus.protocol.wire import subjects

TOKEN_BYTES = 4
"""A token id in messages and hashes: 32 bits, little-endian."""
SCHEME = "xxh3-64"
"""The name of this way to hash blocks."""
_PARENT = struct.Struct("<Q")
_BIG_ENDIAN = array("H", [1]).tobytes() == b"\0\1"


class Adapter(NamedTuple):
    """An adapter that a request uses, and its scale."""

    digest: str
    """Identity of its weights: a replaced file has another digest."""
    scale: float


class PrefixDomain(NamedTuple):
    """Everything two requests must have in common before any of their blocks can be the same."""

    fingerprint: str
    """Identity of the model's weights."""
    adapters: tuple[Adapter, ...] = ()
    tenant: str = ""
    cache_salt: str = ""


def scheme_of(fingerprint: str) -> str:
    """Returns the `hash_scheme` of a model's workers: token ids and hashes are comparable only
    where it is equal."""
    return f"{SCHEME}:{fingerprint}"


@functools.lru_cache(4_096)
def root_hash(domain: PrefixDomain) -> int:
    """Returns the parent of a first block: `xxh3_64` of `fingerprint \\0 digest=scale,... \\0 tenant \\0 salt`."""
    adapters = ",".join(
        f"{subjects.escape(digest)}={_shortest_decimal(scale)}" for digest, scale in sorted(domain.adapters)
    )
    parts = (domain.fingerprint, adapters, subjects.escape(domain.tenant), subjects.escape(domain.cache_salt))
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode())


def block_hashes_of_bytes(data: bytes, block_size: int, parent: int) -> list[int]:
    """Returns the hashes of all full blocks of packed token ids; `parent` comes before the first."""
    assert block_size > 0, block_size
    width = TOKEN_BYTES * block_size
    digest, pack = xxhash.xxh3_64_intdigest, _PARENT.pack
    # A router does this for every prompt: one unpack and one comprehension, without a function call for each block.
    tokens = struct.unpack_from(f"{width}s" * (len(data) // width), data)
    return [parent := digest(pack(parent) + one) for one in tokens]


def next_hash(parent: int, tokens: bytes | memoryview) -> int:
    """Returns the hash of one block, given the hash of the block before it and its own packed token ids."""
    return xxhash.xxh3_64_intdigest(_PARENT.pack(parent) + tokens)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Packs token ids as unsigned 32-bit little-endian integers, the form in which they are hashed and sent."""
    ids = array("I", token_ids)
    assert ids.itemsize == TOKEN_BYTES
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids.tobytes()


def unpack_token_ids(data: bytes) -> "array[int]":
    """Reverses `pack_token_ids`. Raises ValueError for a length that is not a multiple of four."""
    ids = array("I")
    ids.frombytes(data)
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids


def _shortest_decimal(scale: float) -> str:
    """Returns the shortest decimal that reads back as the same number: `1`, `0.5`, `1e-07`."""
    return repr(float(scale)).removesuffix(".0")


def num_common_tokens(one: bytes, other: bytes) -> int:
    """The number of leading token ids that two runs have in common."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // TOKEN_BYTES
    low, high = 0, most // TOKEN_BYTES  # they are equal up to `low` and differ before `high`
    while high - low > 1:
        middle = (low + high) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
