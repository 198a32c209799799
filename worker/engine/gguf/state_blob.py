"""The format in which llama.cpp saves the tokens of a sequence, as far as it must be checked before it is restored.

    | magic, version | streams: 1 | cells | per cell: position, 1, 0 | V is transposed | layers |
    per layer          | type of K | bytes of a row | K of all cells |
    per layer          | type of V | bytes of a row, or of a value and the row's length | V of all cells |

Numbers are little-endian; cells of a sequence that is saved as number 0 name no other. llama.cpp asserts on some of
this, which ends the process. So everything but the tensors' data is compared with a blob of the same context's own.
Of the data, only non-finite numbers can be found: wrong numbers look like right ones.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import xxhash

from tokenbus.worker.contract import KvBlockFormat
from tokenbus.worker.engine.host_cache import finite
from tokenbus.worker.engine.host_cache.finite import NumberType

_HEAD = struct.Struct("<8sII")
_CELL = struct.Struct("<iIi")
_POSITION_BYTES = 4
_LAYERS = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
_TYPE = struct.Struct("<i")
_NUMBER_TYPES = {
    0: finite.F32,
    1: finite.F16,
    2: finite.Q4_0,
    3: finite.Q4_1,
    6: finite.Q5_0,
    7: finite.Q5_1,
    8: finite.Q8_0,
    30: finite.BF16,
}
"""By their numbers in ggml.h."""


class _Tensor(NamedTuple):
    """A layer's keys or values: the bytes before them, and how many they are for each token."""

    framing: bytes
    bytes_per_token: int

    @property
    def number_type(self) -> NumberType:
        return _NUMBER_TYPES[_TYPE.unpack_from(self.framing)[0]]


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

    def problem(self, blob: bytes | bytearray | memoryview, start: int, count: int) -> str:
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
        return "" if self._is_finite(blob, count) else "numbers"

    def _is_finite(self, blob: bytes | bytearray | memoryview, count: int) -> bool:
        view = memoryview(blob)
        return all(finite.all_finite(view[start:end], kind) for kind, start, end in self._data(count))

    def _data(self, count: int) -> Iterator[tuple[NumberType, int, int]]:
        """Yields the type of each tensor's numbers, and where they begin and end in a blob of `count` tokens."""
        offset = _HEAD.size + _CELL.size * count + _LAYERS.size
        for tensor in self.tensors:
            start = offset + len(tensor.framing)
            offset = start + tensor.bytes_per_token * count
            yield tensor.number_type, start, offset


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
