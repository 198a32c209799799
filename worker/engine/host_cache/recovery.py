"""An engine's report of the copies that it finds on start."""

import msgspec


class RecoveredCopies(msgspec.Struct, frozen=True, array_like=True):
    """The copies of an earlier engine found in a region."""

    blocks: int = 0
    num_bytes: int = 0
    discarded: dict[str, int] = {}
    """The number of unusable non-empty slots, by reason."""
