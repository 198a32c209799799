"""The identity of keys and values: engines may read each other's only where it is the same."""


def kv_identity(fingerprint: str, layout: str, build: str, block_size: int) -> str:
    """Returns the identity of an engine's keys and values.

    `fingerprint` is that of the model's files; `layout` says how they lie in memory, and `build` is the name and
    version of the library that writes them. Adapters belong to the domain of a block."""
    return ":".join((fingerprint, layout, build, str(block_size)))
