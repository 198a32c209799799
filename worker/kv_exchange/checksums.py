"""Computes the checksums of blocks, once for each at either end."""

import asyncio
from collections.abc import Sequence

import xxhash

_AT_ONCE_BYTES = 256 * 1024
"""More is left to another thread: the event loop that moves blocks also pings for the worker's fence."""


async def checksums_of(contents: Sequence[bytes]) -> list[int]:
    """Returns the checksum of each."""
    if sum(map(len, contents)) > _AT_ONCE_BYTES:
        return await asyncio.to_thread(_checksums, contents)
    return _checksums(contents)


def _checksums(contents: Sequence[bytes]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(content) for content in contents]
