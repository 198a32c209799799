"""Reads the form of the state that llama.cpp saves for a sequence; pure.

    u32 magic   i32 sequence   u32 streams (1)   u32 cells
    for each cell:                      i32 position   u32 sequences (1)   i32 sequence
    u32 transposed   u32 layers
    for each layer, its keys:           i32 type   u64 bytes a cell           data
    for each layer, its values:         i32 type   u64 bytes a cell           data
    or, if they are transposed:         i32 type   u32 bytes a value   u32 values a cell   data

llama.cpp asserts on some of this, so whatever comes from elsewhere must agree with it byte for byte."""

import struct
from typing import NamedTuple

from tokenbus.worker.contract import KvBlockFormat

_HEAD = struct.Struct("<IiII")
_CELL = struct.Struct("<iIi")
_LAYERS = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")


class _Tensor(NamedTuple):
    """The keys or the values of one layer: the bytes before the data, and the size of one cell's data."""

    head: bytes
    cell_bytes: int


def learn(blob: bytes, num_tokens: int, block_size: int) -> KvBlockFormat | None:
    """Returns the form of a saved block, from the state of the first `num_tokens` tokens of a sequence; None if that
    is not of the form above, such as where cells have more than one position."""
    try:
        magic, seq_id, num_streams, num_cells = _HEAD.unpack_from(blob)
        cells = [_CELL.unpack_from(blob, _HEAD.size + place * _CELL.size) for place in range(num_tokens)]
        at = _HEAD.size + num_tokens * _CELL.size
        transposed, num_layers = _LAYERS.unpack_from(blob, at)
        at += _LAYERS.size
        tensors: list[_Tensor] = []
        for place in range(2 * num_layers):
            is_column = bool(transposed) and place >= num_layers
            tensor = _read_tensor(blob, at, is_column=is_column)
            tensors.append(tensor)
            at += len(tensor.head) + num_tokens * tensor.cell_bytes
    except struct.error:  # it ends too early
        return None
    places = sorted(position for position, _, _ in cells)
    rest = {(count, cell_seq_id) for _, count, cell_seq_id in cells}
    if (num_streams, num_cells, transposed > 1, at) != (1, num_tokens, False, len(blob)):
        return None
    if places != list(range(num_tokens)) or rest != {(1, seq_id)}:
        return None
    head = _HEAD.pack(magic, seq_id, 1, block_size)
    return _format(head, seq_id, _LAYERS.pack(transposed, num_layers), tensors, block_size)


def _read_tensor(blob: bytes, at: int, *, is_column: bool) -> _Tensor:
    if is_column:
        _, value_bytes, num_values = _COLUMNS.unpack_from(blob, at)
        return _Tensor(blob[at : at + _COLUMNS.size], value_bytes * num_values)
    return _Tensor(blob[at : at + _ROWS.size], _ROWS.unpack_from(blob, at)[1])


def _format(head: bytes, seq_id: int, layers: bytes, tensors: list[_Tensor], block_size: int) -> KvBlockFormat:
    fixed, at = [(0, head)], len(head)
    positions = []
    for _ in range(block_size):
        positions.append(at)
        fixed.append((at + 4, _CELL.pack(0, 1, seq_id)[4:]))
        at += _CELL.size
    fixed.append((at, layers))
    at += len(layers)
    for tensor in tensors:
        fixed.append((at, tensor.head))
        at += len(tensor.head) + block_size * tensor.cell_bytes
    return KvBlockFormat(num_bytes=at, fixed=tuple(fixed), positions=tuple(positions))
