"""One batch of a dynamic cache: which lanes share it, and the buffers that hold its keys and values."""

from collections.abc import Mapping

import numpy as np

from tokenbus.worker.contract.engine_errors import InsufficientMemoryError
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.graph import KvTensor
from tokenbus.worker.engine.onnx.graphs.session import Binding

_HEADROOM_COLUMNS = 128
"""The number of columns by which a batch can grow before it needs new buffers."""
LEFT = -1
"""Stands for the lane of a row that has left the batch."""


def bucket_by_length(lengths: Mapping[int, int], max_paddings: int) -> list[list[int]]:
    """Groups lanes into batches, longest first. All rows of a batch have the length of its longest, with at most
    `max_paddings` padding columns in total."""
    batches: list[list[int]] = []
    longest = paddings = 0
    for lane in sorted(lengths, key=lambda lane: (-lengths[lane], lane)):
        # Lanes come in descending order, so a lane that joins is never longer than the batch.
        paddings += longest - lengths[lane]
        if not batches or paddings > max_paddings:
            batches.append([])
            longest, paddings = lengths[lane], 0
        batches[-1].append(lane)
    return batches


class RowBatch:
    """Rows of equal width, a lane in each. A run reads one set of buffers and writes the other; then they swap."""

    def __init__(self, kv: tuple[KvTensor, ...], lanes: list[int], mask: Array) -> None:
        self.lanes = lanes
        self.mask = mask
        """The columns of each row that have a token, of (rows, columns)."""
        self.binding: Binding | None = None
        self._kv = kv
        self._capacity = 0
        self._buffers: tuple[list[Array], list[Array]] = ([], [])

    def __repr__(self) -> str:
        return f"<RowBatch of lanes {self.lanes}, {self.columns} columns>"

    @property
    def columns(self) -> int:
        return int(self.mask.shape[1])

    def arrays(self) -> list[Array]:
        """Returns the cache: for each tensor of the graph one of (rows, heads, columns, width)."""
        return self._views(0, self.columns)

    def targets(self, columns: int) -> list[Array]:
        """Returns the arrays for a run to write that ends with `columns` columns."""
        return self._views(1, columns)

    def reserve(self, columns: int) -> None:
        """Makes sure that the cache can grow to that width, keeping its content. Raises InsufficientMemoryError."""
        if self._buffers[0] and columns <= self._capacity:
            return
        kept = self.arrays() if self._buffers[0] else []
        capacity = columns + _HEADROOM_COLUMNS
        sizes = [len(self.lanes) * kv.heads * capacity * kv.width for kv in self._kv]
        try:
            both = [[np.empty(size, kv.dtype) for size, kv in zip(sizes, self._kv, strict=True)] for _ in range(2)]
        except MemoryError as error:
            text = f"no memory for a batch of {len(self.lanes)} rows of {capacity} tokens"
            raise InsufficientMemoryError(text) from error
        self._buffers, self._capacity = (both[0], both[1]), capacity
        for array, old in zip(self.arrays(), kept, strict=bool(kept)):
            array[:] = old

    def commit(self, mask: Array) -> None:
        """Makes the targets, which a run has written, the cache."""
        self._buffers = (self._buffers[1], self._buffers[0])
        self.mask = mask

    def row(self, lane: int) -> tuple[int, Array]:
        """Returns the row of a lane, and the columns in which it has tokens."""
        row = self.lanes.index(lane)
        return row, np.flatnonzero(self.mask[row])

    def _views(self, which: int, columns: int) -> list[Array]:
        # Buffers are flat, so that views of any width are contiguous, as onnxruntime requires.
        shapes = [(len(self.lanes), kv.heads, columns, kv.width) for kv in self._kv]
        return [
            buffer[: rows * heads * count * width].reshape(rows, heads, count, width)
            for buffer, (rows, heads, count, width) in zip(self._buffers[which], shapes, strict=True)
        ]
