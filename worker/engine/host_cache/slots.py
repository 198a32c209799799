"""The slots that hold copies of blocks and checkpoints: how a region is divided, and how a slot describes its contents;
pure.

    region    | region header, 4,096 bytes | slot 0 | slot 1 | ... |
    slot      | slot header | token ids, as many as a block has | data, as much as a block has |
    header    | checksum | data's checksum | number | start | tokens | bytes | part | parts | kind | root | digests |

A slot is empty while its checksum is 0. A writer empties a slot first and writes the header last, so that at any moment
a slot is empty, whole or torn; the checksums reveal a torn one. The last block of a path may have fewer tokens than a
full block, and then less data.

A copy of a block takes one slot. A copy of a checkpoint takes several, its parts, which have the same number: each has
a share of its tokens and of its data. The copy is whole if all parts are.
"""

import struct
from typing import NamedTuple

import xxhash

from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.engine.kv.prefix_tree import DIGEST_BYTES, BlockLabel

REGION_HEADER_BYTES = 4_096
_REGION_MAGIC = b"tokenbus kv slots "
_REGION_VERSION = b"2\n"
_HEADER = struct.Struct(f"<QQQIIIIIIQ{DIGEST_BYTES}s{DIGEST_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 64
EMPTY = _CHECKSUM.pack(0)
"""Written over the beginning of a slot's header, empties the slot."""


class SlotError(ValueError):
    """A slot does not hold a usable copy. The message is a short reason, for metrics."""


class SlotHeader(NamedTuple):
    """A description of a slot's block, or part of a copy, and its data."""

    number: int
    """Increases with every copy made, so that copies can be ordered by age."""
    label: BlockLabel
    """The copy's label, but with only this part's tokens."""
    num_bytes: int
    data_checksum: int
    part: int = 0
    parts: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.label.tokens) // TOKEN_BYTES


class SlotLayout(NamedTuple):
    """The sizes of a region and its slots."""

    block_size: int
    block_bytes: int
    """The bytes in a full block's data."""
    num_slots: int

    @property
    def header_bytes(self) -> int:
        return _aligned(_HEADER.size + TOKEN_BYTES * self.block_size)

    @property
    def slot_bytes(self) -> int:
        return self.header_bytes + _aligned(self.block_bytes)

    @property
    def region_bytes(self) -> int:
        return REGION_HEADER_BYTES + self.num_slots * self.slot_bytes

    def parts(self, num_bytes: int, num_tokens: int) -> int:
        """Returns how many slots a copy takes."""
        return max(1, -(-num_bytes // self.block_bytes), -(-num_tokens // self.block_size))

    def offset(self, slot: int) -> int:
        """The offset of a slot in the region."""
        return REGION_HEADER_BYTES + slot * self.slot_bytes

    def region_header(self, identity: str) -> bytes:
        """Returns the beginning of a region for the keys and values of an identity; a region is readable only if it is
        equal. A region may have more or fewer slots."""
        sizes = f"{self.block_size} {self.block_bytes}\n"
        header = _REGION_MAGIC + _REGION_VERSION + sizes.encode() + identity.encode()
        assert len(header) <= REGION_HEADER_BYTES, identity
        return header.ljust(REGION_HEADER_BYTES, b"\0")

    def pack(self, header: SlotHeader) -> bytes:
        """Returns a slot's header and token ids."""
        label = header.label
        fields = _HEADER.pack(
            0,
            header.data_checksum,
            header.number,
            label.start,
            header.num_tokens,
            header.num_bytes,
            header.part,
            header.parts,
            int(label.is_state),
            label.root_hash,
            label.root_digest,
            label.parent_digest,
        )
        body = (fields + label.tokens).ljust(self.header_bytes, b"\0")[_CHECKSUM.size :]
        return _CHECKSUM.pack(checksum(body)) + body

    def unpack(self, data: bytes) -> SlotHeader | None:
        """Returns the header of a slot, or None if the slot is empty. Raises SlotError."""
        if len(data) < self.header_bytes:
            raise SlotError("truncated")
        if data[: _CHECKSUM.size] == EMPTY:
            return None
        fields = _HEADER.unpack_from(data)
        found, data_checksum, number, start, num_tokens, num_bytes, part, parts, kind, root_hash, root, parent = fields
        if found != checksum(data[_CHECKSUM.size : self.header_bytes]):
            raise SlotError("torn")
        if num_tokens > self.block_size or num_bytes > self.block_bytes or not num_tokens + num_bytes or part >= parts:
            raise SlotError("size")
        tokens = data[_HEADER.size : _HEADER.size + TOKEN_BYTES * num_tokens]
        label = BlockLabel(root_hash, root, parent, start, tokens, is_state=bool(kind))
        return SlotHeader(number, label, num_bytes, data_checksum, part, parts)


def checksum(data: bytes | memoryview) -> int:
    """Returns a checksum that is never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
