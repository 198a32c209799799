"""The hashes of blocks of a list of token ids."""

from collections.abc import Sequence

from tokenbus.protocol.wire import block_hash


def block_hashes(token_ids: Sequence[int], block_size: int, parent: int) -> list[int]:
    """Returns the hashes of all full blocks of `token_ids` (each below 2**32); `parent` comes before the first."""
    return block_hash.block_hashes_of_bytes(block_hash.pack_token_ids(token_ids), block_size, parent)
