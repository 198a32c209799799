"""The copies that an engine finds when it starts, as it reports them."""

import msgspec


class Recovery(msgspec.Struct, frozen=True, array_like=True):
    """The copies of an earlier engine that were found in a region."""

    blocks: int = 0
    num_bytes: int = 0
    discarded: dict[str, int] = {}
    """The number of slots that were not empty and could not be used, by reason."""
