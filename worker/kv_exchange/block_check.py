"""Checks blocks from another worker before the engine sees them.

Whether the numbers are what the model would compute can't be checked: workers of a model trust each other in that.
Everything else is compared, since an engine may abort on a block in another format."""

import struct

from tokenbus.worker.contract.contract import KvBlockFormat

_NUMBER = struct.Struct("<i")


def problem(block_format: KvBlockFormat, block: bytes, start: int) -> str:
    """Returns why these bytes can't be the block whose first token is at position `start`; empty if they can."""
    if len(block) != block_format.num_bytes:
        return f"it has {len(block)} bytes, a block has {block_format.num_bytes}"
    for offset, expected in block_format.fixed:
        if block[offset : offset + len(expected)] != expected:
            return f"it differs in what all blocks have at byte {offset}"
    found = [{_NUMBER.unpack_from(block, at)[0] for at in places} for places in block_format.positions]
    if sorted(map(sorted, found)) != [[position] for position in range(start, start + len(found))]:
        return f"its tokens are not those from {start} on"
    if any(not 0 <= _NUMBER.unpack_from(block, at)[0] < block_format.vocab_size for at in block_format.token_ids):
        return f"the vocabulary has {block_format.vocab_size} tokens, and a block's is none of them"
    return ""
