"""The format in which llama.cpp saves the tokens of a sequence, as far as it must be checked before it is restored.

    | magic, version | streams: 1 | cells | per cell: words of 32 bits | V is transposed | layers |
    per layer          | type of K | bytes of a row | K of all cells |
    per layer          | type of V | bytes of a row, or of a value and the row's length | V of all cells |

A cell is its position, 1 and 0 (one sequence, saved as number 0); models whose tokens have two-dimensional positions
(M-RoPE) have three more words after the 1: the position twice, as for text, and the token's id. Numbers are
little-endian. llama.cpp asserts on some of this, which ends the process. So everything but the tensors' data is
compared with one of the context's own blobs. In the data, only non-finite numbers can be detected: wrong numbers look
like right ones.
"""

import contextlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tokenbus.worker.contract.contract import KvBlockFormat
from tokenbus.worker.engine.device import non_finite
from tokenbus.worker.files import number_types
from tokenbus.worker.files.number_types import NumberType

_HEAD = struct.Struct("<8sII")
_WORD = struct.Struct("<i")
_CELLS = ("P10", "P1PPT0")
"""The words of a cell: its position, 1, 0, or the token's id."""
_LAYERS = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
_TYPE = struct.Struct("<i")


class _Tensor(NamedTuple):
    """A layer's keys or values: the bytes before them, and their number of bytes per token."""

    framing: bytes
    bytes_per_token: int

    @property
    def number_type(self) -> NumberType:
        return number_types.BY_GGML[_TYPE.unpack_from(self.framing)[0]]


class StateFormat(NamedTuple):
    """The format of one context's blobs."""

    head: bytes
    cell: str
    """The words of a cell."""
    vocab_size: int
    layers: bytes
    is_transposed: bool
    """Whether values are stored by channel rather than by token, as they are without flash attention."""
    tensors: tuple[_Tensor, ...]

    def size(self, count: int) -> int:
        """Returns the size of a blob of `count` tokens."""
        tensors = sum(len(tensor.framing) + tensor.bytes_per_token * count for tensor in self.tensors)
        return self._layers_at(count) + _LAYERS.size + tensors

    @property
    def digest(self) -> str:
        """A digest that distinguishes contexts whose blobs differ in layout."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self))

    @property
    def has_flash_tiles(self) -> bool:
        """Whether llama.cpp's attention on CPUs can go through these keys and values in tiles."""
        types = {tensor.number_type.name for tensor in self.tensors}
        return not self.is_transposed and types in ({"f16"}, {"f32"})

    def block_format(self, block_size: int) -> KvBlockFormat:
        """Returns the layout of a full block's blob."""
        fixed = [(0, _HEAD.pack(self.head, 1, block_size))]
        places: dict[str, list[list[int]]] = {kind: [] for kind in "PT10"}
        for start in range(_HEAD.size, self._layers_at(block_size), _WORD.size * len(self.cell)):
            for kind, found in places.items():
                found.append([start + _WORD.size * at for at, word in enumerate(self.cell) if word == kind])
        for word in "10":
            fixed += [(at, _WORD.pack(int(word))) for found in places[word] for at in found]
        offset = self._layers_at(block_size)
        fixed.append((offset, self.layers))
        offset += _LAYERS.size
        for tensor in self.tensors:
            fixed.append((offset, tensor.framing))
            offset += len(tensor.framing) + tensor.bytes_per_token * block_size
        return KvBlockFormat(
            num_bytes=offset,
            fixed=tuple(fixed),
            positions=tuple(map(tuple, places["P"])),
            token_ids=tuple(at for found in places["T"] for at in found),
            vocab_size=self.vocab_size,
        )

    def problem(self, blob: bytes | bytearray | memoryview, start: int, count: int) -> str:
        """Says in a word what is wrong with a blob of `count` tokens from position `start` on; empty if nothing is."""
        if len(blob) != self.size(count):
            return "size"
        if _HEAD.unpack_from(blob) != (self.head, 1, count):
            return "framing"
        if not self._are_cells(np.frombuffer(blob, "<i4", count * len(self.cell), _HEAD.size), start):
            return "positions"
        offset = self._layers_at(count)
        if blob[offset : offset + _LAYERS.size] != self.layers:
            return "framing"
        offset += _LAYERS.size
        for tensor in self.tensors:
            if blob[offset : offset + len(tensor.framing)] != tensor.framing:
                return "framing"
            offset += len(tensor.framing) + tensor.bytes_per_token * count
        return "" if self._is_finite(blob, count) else "numbers"

    def _layers_at(self, count: int) -> int:
        """Returns the offset at which the cells end in a blob of `count` tokens."""
        return _HEAD.size + _WORD.size * len(self.cell) * count

    def _are_cells(self, words: np.ndarray[Any, np.dtype[np.int32]], start: int) -> bool:
        """Whether these are the cells of the tokens from position `start` on."""
        columns = words.reshape(-1, len(self.cell)).T
        positions = columns[0]
        # Cells come in memory order, which need not be token order.
        if not np.array_equal(np.sort(positions), np.arange(start, start + len(positions))):
            return False
        for column, kind in zip(columns, self.cell, strict=True):
            match kind:
                case "P":
                    fits = column == positions
                case "T":
                    fits = (column >= 0) & (column < self.vocab_size)
                case _:
                    fits = column == int(kind)
            if not fits.all():
                return False
        return True

    def _is_finite(self, blob: bytes | bytearray | memoryview, count: int) -> bool:
        view = memoryview(blob)
        return all(non_finite.all_finite(view[start:end], kind) for kind, start, end in self._data(count))

    def _data(self, count: int) -> Iterator[tuple[NumberType, int, int]]:
        """Yields the type of each tensor's numbers, and where they begin and end in a blob of `count` tokens."""
        offset = self._layers_at(count) + _LAYERS.size
        for tensor in self.tensors:
            start = offset + len(tensor.framing)
            offset = start + tensor.bytes_per_token * count
            yield tensor.number_type, start, offset


def unknown(data: memoryview, start: int, count: int) -> str:
    """Reports any blob as being of unknown format."""
    return "framing"


def learn(blob: bytes, start: int, count: int, vocab_size: int) -> StateFormat | None:
    """Returns a context's format from one of its own blobs; None if the format is unknown."""
    for cell in _CELLS:
        with contextlib.suppress(struct.error, KeyError, ValueError):
            if (found := _learn(blob, start, count, cell, vocab_size)) is not None:
                return found
    return None


def _learn(blob: bytes, start: int, count: int, cell: str, vocab_size: int) -> StateFormat | None:
    head, _, _ = _HEAD.unpack_from(blob)
    offset = _HEAD.size + _WORD.size * len(cell) * count
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
            if row_bytes > len(blob):
                return None
            tensors.append(_Tensor(blob[offset : offset + framing_bytes], row_bytes))
            offset += framing_bytes + row_bytes * count
    found = StateFormat(head, cell, vocab_size, layers, bool(is_transposed), tuple(tensors))
    return None if found.problem(blob, start, count) else found
