"""The chained hash that names a block of prompt tokens everywhere: `xxh3_64(parent, token ids)`.

A block's hash says which tokens it holds and everything before them, so equal hashes mean equal prefixes. It is a hint
for routing, not an identity: before a worker reuses a block it compares the tokens.
"""

import functools
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tokenbus.protocol.wire import subjects


class Adapter(NamedTuple):
    name: str
    scale: float


class PrefixDomain(NamedTuple):
    """What two requests must have in common before any of their blocks can be the same."""

    fingerprint: str
    """Identity of the model's weights."""
    adapters: tuple[Adapter, ...] = ()
    tenant: str = ""
    cache_salt: str = ""


@functools.lru_cache(4_096)
def root_hash(domain: PrefixDomain) -> int:
    """The parent of a first block: `xxh3_64` of `fingerprint \\0 name=scale,... \\0 tenant \\0 salt`."""
    adapters = ",".join(
        f"{subjects.escape(name)}={_shortest_decimal(scale)}" for name, scale in sorted(domain.adapters)
    )
    parts = (domain.fingerprint, adapters, subjects.escape(domain.tenant), subjects.escape(domain.cache_salt))
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode())


def block_hashes(token_ids: Sequence[int], block_size: int, parent: int) -> list[int]:
    """Hashes of all full blocks of `token_ids` (each below 2**32), first to last; `parent` comes before the first."""
    return block_hashes_of_bytes(pack_token_ids(token_ids), block_size, parent)


def block_hashes_of_bytes(data: bytes, block_size: int, parent: int) -> list[int]:
    """As `block_hashes`, of token ids in the form in which they are sent (`pack_token_ids`)."""
    assert block_size > 0, block_size
    width = 4 * block_size
    digest, pack = xxhash.xxh3_64_intdigest, _PARENT.pack
    tokens = struct.unpack_from(f"{width}s" * (len(data) // width), data)
    return [parent := digest(pack(parent) + one) for one in tokens]


_PARENT = struct.Struct("<Q")


def next_hash(parent: int, tokens: bytes | memoryview) -> int:
    """The hash of one block, from that of the block before it and its own token ids as bytes."""
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + tokens)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian integers, the form in which they are hashed and sent."""
    ids = array("I", token_ids)
    assert ids.itemsize == 4
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids.tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """The reverse of `pack_token_ids`. Raises ValueError for a length that is no multiple of four."""
    ids = array("I")
    ids.frombytes(data)
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids.tolist()


def hash_to_hex(value: int) -> str:
    """A hash as it appears in JSON: 16 lower-case hex digits."""
    return f"{value:016x}"


def _shortest_decimal(scale: float) -> str:
    """The shortest decimal that reads back as the same number: `1`, `0.5`, `1e-07`."""
    return repr(float(scale)).removesuffix(".0")


_BIG_ENDIAN = array("H", [1]).tobytes() == b"\0\1"
