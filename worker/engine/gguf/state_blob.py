"""The format in which llama.cpp saves the tokens of a sequence, as far as it must be checked before it is restored.

    | magic, version | streams: 1 | cells | per cell: position, 1, 0 | V is transposed | layers |
    per layer          | type of K | bytes of a row | K of all cells |
    per layer          | type of V | bytes of a row, or of a value and the row's length | V of all cells |

Numbers are little-endian; cells of a sequence that is saved as number 0 name no other. llama.cpp asserts on some of
this, which ends the process. So everything but the tensors' data is compared with a blob of the same context's own.
Data can't be checked: wrong numbers look like right ones.
"""

import struct
from typing import NamedTuple

import msgspec
import xxhash

from tokenbus.worker.contract import KvBlockFormat

_HEAD = struct.Struct("<8sII")
_CELL = struct.Struct("<iIi")
_POSITION_BYTES = 4
_LAYERS = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")


class _Tensor(NamedTuple):
    """A layer's keys or values: the bytes before them, and how many they are for each token."""

    framing: bytes
    bytes_per_token: int


class StateFormat(NamedTuple):
    """The format of one context's blobs."""

    head: bytes
    layers: bytes
    is_transposed: bool
    """Whether values lie by channel and not by token, as they do without flash attention."""
    tensors: tuple[_Tensor, ...]

    def size(self, count: int) -> int:
        """Returns the size of a blob of `count` tokens."""
        tensors = sum(len(tensor.framing) + tensor.bytes_per_token * count for tensor in self.tensors)
        return _HEAD.size + _CELL.size * count + _LAYERS.size + tensors

    @property
    def digest(self) -> str:
        """Tells contexts apart whose blobs differ in form."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self))

    def block_format(self, block_size: int) -> KvBlockFormat:
        """Returns the form of the blob of a full block."""
        fixed = [(0, _HEAD.pack(self.head, 1, block_size))]
        positions = [_HEAD.size + _CELL.size * cell for cell in range(block_size)]
        one_sequence = _CELL.pack(0, 1, 0)[_POSITION_BYTES:]
        fixed += [(position + _POSITION_BYTES, one_sequence) for position in positions]
        offset = _HEAD.size + _CELL.size * block_size
        fixed.append((offset, self.layers))
        offset += _LAYERS.size
        for tensor in self.tensors:
            fixed.append((offset, tensor.framing))
            offset += len(tensor.framing) + tensor.bytes_per_token * block_size
        return KvBlockFormat(num_bytes=offset, fixed=tuple(fixed), positions=tuple(positions))

    def problem(self, blob: bytes | memoryview, start: int, count: int) -> str:
        """Says in a word what is wrong with a blob of `count` tokens from position `start` on; empty if nothing is."""
        if len(blob) != self.size(count):
            return "size"
        if _HEAD.unpack_from(blob) != (self.head, 1, count):
            return "framing"
        cells = list(_CELL.iter_unpack(blob[_HEAD.size : _HEAD.size + _CELL.size * count]))
        # Cells come as they lie in memory, which need not be in order.
        if sorted(cells) != [(position, 1, 0) for position in range(start, start + count)]:
            return "positions"
        offset = _HEAD.size + _CELL.size * count
        if blob[offset : offset + _LAYERS.size] != self.layers:
            return "framing"
        offset += _LAYERS.size
        for tensor in self.tensors:
            if blob[offset : offset + len(tensor.framing)] != tensor.framing:
                return "framing"
            offset += len(tensor.framing) + tensor.bytes_per_token * count
        return ""


def learn(blob: bytes, start: int, count: int) -> StateFormat | None:
    """Returns the format of a context from a blob of its own; None if it is none that is known here."""
    try:
        return _learn(blob, start, count)
    except struct.error:
        return None


def _learn(blob: bytes, start: int, count: int) -> StateFormat | None:
    head, _, _ = _HEAD.unpack_from(blob)
    offset = _HEAD.size + _CELL.size * count
    is_transposed, num_layers = _LAYERS.unpack_from(blob, offset)
    layers = blob[offset : offset + _LAYERS.size]
    offset += _LAYERS.size
    tensors: list[_Tensor] = []
    for is_value in (False, True):
        for _ in range(num_layers):
            if is_value and offset == len(blob):  # some models derive the values from the keys
                break
            if is_value and is_transposed:
                _, value_bytes, num_values = _COLUMNS.unpack_from(blob, offset)
                row_bytes, framing_bytes = value_bytes * num_values, _COLUMNS.size
            else:
                _, row_bytes = _ROWS.unpack_from(blob, offset)
                framing_bytes = _ROWS.size
            tensors.append(_Tensor(blob[offset : offset + framing_bytes], row_bytes))
            offset += framing_bytes + row_bytes * count
    found = StateFormat(head, layers, bool(is_transposed), tuple(tensors))
    return None if found.problem(blob, start, count) else found
