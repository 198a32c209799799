"""The identity of keys and values: engines may read each other's only where it is the same."""

from collections.abc import Iterable


def kv_identity(fingerprint: str, layout: str, build: str, block_size: int, adapters: Iterable[str] = ()) -> str:
    """Returns the identity of an engine's keys and values.

    `fingerprint` is that of the model's files and `adapters` are the digests of what changes its weights; `layout` says
    how they lie in memory, and `build` is the name and version of the library that writes them."""
    return ":".join((fingerprint, ",".join(adapters), layout, build, str(block_size)))
