"""The identity of keys and values: engines may read each other's only if it is the same."""


def kv_identity(fingerprint: str, layout: str, build: str, block_size: int) -> str:
    """Returns the identity of an engine's keys and values.

    `fingerprint` is that of the model's files; `layout` is their layout in memory, and `build` the name and version of
    the library that writes them. Adapters are part of a block's domain."""
    return ":".join((fingerprint, layout, build, str(block_size)))
