"""The cache of a graph with plain attention: batches whose every run gives the cache back, longer by a column.

    batch of three lanes, decoding         columns ->
    lane 4 | t t t t t t t t t t t t
    lane 0 | t t t t t t . . . t t t      `.`: no token, hidden by the mask
    lane 7 | t t . . . . . . . t t t

Lanes that decode together are packed into a batch when they meet, each from column 0 on; every step appends a column to
all of them. A lane is in exactly one batch. The cache lies in the host's memory."""

from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.engine.onnx.arrays import Array
from tokenbus.worker.engine.onnx.cache import length_buckets
from tokenbus.worker.engine.onnx.cache.kv_cache import DecodeResult
from tokenbus.worker.engine.onnx.cache.lanes import Copy, Shrink, Transfer
from tokenbus.worker.engine.onnx.graphs.graph import KvTensor
from tokenbus.worker.engine.onnx.graphs.graph_runner import GraphRunner
from tokenbus.worker.engine.onnx.graphs.session import Binding
from tokenbus.worker.engine.runner import InsufficientMemoryError
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens

_HEADROOM_COLUMNS = 128
"""Columns that a batch can take before it needs other memory."""


class _Batch:
    """Rows of equal width. Two sets of buffers take turns: a run reads one and writes the other."""

    def __init__(self, kv: tuple[KvTensor, ...], lanes: list[int], mask: Array) -> None:
        self.lanes = lanes
        """The lane of each row; -1 where it has left."""
        self.mask = mask
        self.binding: Binding | None = None
        self._kv = kv
        self._capacity = 0
        self._buffers: tuple[list[Array], list[Array]] = ([], [])

    def __repr__(self) -> str:
        return f"<Batch of lanes {self.lanes}, {self.mask.shape[1]} columns>"

    @property
    def columns(self) -> int:
        return int(self.mask.shape[1])

    def arrays(self) -> list[Array]:
        """The cache, a tensor of (rows, heads, columns, width) for each of the graph's."""
        return [self._view(buffer, kv, self.columns) for buffer, kv in zip(self._buffers[0], self._kv, strict=True)]

    def reserve(self, columns: int) -> None:
        """Sees to it that the cache can grow to that width; keeps what is there. Raises InsufficientMemoryError."""
        if self._buffers[0] and columns <= self._capacity:
            return
        kept = self.arrays() if self._buffers[0] else []
        capacity = columns + _HEADROOM_COLUMNS
        sizes = [len(self.lanes) * kv.heads * capacity * kv.width for kv in self._kv]
        try:
            both = [[np.empty(size, kv.dtype) for size, kv in zip(sizes, self._kv, strict=True)] for _ in range(2)]
        except MemoryError as error:
            raise InsufficientMemoryError(
                f"no memory for a batch of {len(self.lanes)} rows of {capacity} tokens"
            ) from error
        self._buffers, self._capacity = (both[0], both[1]), capacity
        for array, old in zip(self.arrays(), kept, strict=bool(kept)):
            array[:] = old

    def targets(self, columns: int) -> list[Array]:
        """Where a run that ends with so many columns writes."""
        return [self._view(buffer, kv, columns) for buffer, kv in zip(self._buffers[1], self._kv, strict=True)]

    def commit(self, mask: Array) -> None:
        """A run has written its targets: they are the cache from now on."""
        self._buffers = (self._buffers[1], self._buffers[0])
        self.mask = mask

    def row(self, lane: int) -> tuple[int, Array]:
        """The row of a lane, and the columns in which it has tokens."""
        row = self.lanes.index(lane)
        return row, np.flatnonzero(self.mask[row])

    def _view(self, buffer: Array, kv: KvTensor, columns: int) -> Array:
        shape = (len(self.lanes), kv.heads, columns, kv.width)
        view: Array = buffer[: shape[0] * shape[1] * shape[2] * shape[3]].reshape(shape)
        return view


class DynamicCache:
    """`allow_gaps`: rows may have columns without a token, which a graph that counts its positions itself can't
    bear."""

    def __init__(self, graph_runner: GraphRunner, max_paddings: int, *, allow_gaps: bool) -> None:
        self._graph_runner = graph_runner
        self._max_paddings = max_paddings if allow_gaps else 0
        self._allow_gaps = allow_gaps
        self._batches: dict[int, _Batch] = {}

    def __repr__(self) -> str:
        return f"<DynamicCache {set(self._batches.values())}>"

    def apply(self, changes: Listing[Copy | Transfer | Shrink]) -> None:
        for change in changes:
            match change:
                case Copy(lane, to, start, end):
                    self._copy(lane, to, start, end)
                case Transfer(lane, to, end):
                    self._rename(lane, to)
                    self._shrink(to, end)
                case Shrink(lane, end):
                    self._shrink(lane, end)

    def decode(self, parts: Listing[ScheduledTokens]) -> DecodeResult:
        """Raises InsufficientMemoryError and DeviceError."""
        of_lane = {part.lane: part for part in parts}
        lengths = {part.lane: part.start for part in parts}
        in_rows: list[ScheduledTokens] = []
        found: list[Array] = []
        for lanes in length_buckets.bucket_by_length(lengths, self._max_paddings):
            batch = self._batch_of(lanes)
            rows = [of_lane[lane] for lane in batch.lanes]
            ids = np.array([[part.token_ids[0]] for part in rows])
            positions = np.array([[part.start] for part in rows])
            found.append(self._run(batch, ids, positions))
            in_rows += rows
        return DecodeResult(in_rows, found[0] if len(found) == 1 else np.concatenate(found))

    def prompt(self, part: ScheduledTokens, *, wants_logits: bool) -> Array:
        """The logits behind a part of any length, (1, vocabulary), or none. Raises InsufficientMemoryError and
        DeviceError."""
        batch = self._batch_of([part.lane])
        ids = np.array(part.token_ids, np.int64)[None]
        positions = np.arange(part.start, part.start + part.num_tokens)[None]
        return self._run(batch, ids, positions, wants_logits=wants_logits)

    def _run(self, batch: _Batch, ids: Array, positions: Array, *, wants_logits: bool = True) -> Array:
        new = np.ones(ids.shape, np.int64)
        mask = np.concatenate([batch.mask, new], axis=1)
        batch.reserve(mask.shape[1])
        batch.binding = batch.binding or self._graph_runner.bind()
        for kv, past, present in zip(
            self._graph_runner.graph.kv, batch.arrays(), batch.targets(mask.shape[1]), strict=True
        ):
            batch.binding.bind_input(kv.past, past)
            batch.binding.bind_output(kv.present, present)
        has_past = batch.columns > 0
        logits = self._graph_runner.run(
            batch.binding, ids, mask, positions, has_past=has_past, wants_logits=wants_logits
        )
        batch.commit(mask)
        return logits

    # packing

    def _batch_of(self, lanes: list[int]) -> _Batch:
        """A batch of exactly these lanes."""
        batch = self._batches.get(lanes[0])
        if batch is None or set(batch.lanes) != set(lanes):
            batch = self._repack(lanes)
        return batch

    def _repack(self, lanes: list[int]) -> _Batch:
        found = [self._row(lane) for lane in lanes]
        width = max(len(columns) for _, _, columns in found)
        mask = np.zeros((len(lanes), width), np.int64)
        for row, (_, _, columns) in enumerate(found):
            mask[row, : len(columns)] = 1
        batch = _Batch(self._graph_runner.graph.kv, list(lanes), mask)
        batch.reserve(width)
        for tensor, target in enumerate(batch.arrays()):
            for row, (source, at, columns) in enumerate(found):
                target[row, :, : len(columns)] = source[tensor][at][:, columns] if len(columns) else 0
                target[row, :, len(columns) :] = 0
        self._remove(lanes)
        self._batches |= dict.fromkeys(lanes, batch)
        return batch

    def _row(self, lane: int) -> tuple[list[Array], int, Array]:
        batch = self._batches.get(lane)
        if batch is None:
            return [], 0, np.empty(0, np.int64)
        row, columns = batch.row(lane)
        return batch.arrays(), row, columns

    def _remove(self, lanes: list[int]) -> None:
        """Takes lanes out of their batches; one that has become half empty is packed anew."""
        left = {batch for lane in lanes if (batch := self._batches.pop(lane, None)) is not None}
        for batch in left:
            batch.lanes = [-1 if lane in lanes else lane for lane in batch.lanes]
            others = [lane for lane in batch.lanes if lane >= 0]
            if others and 2 * len(others) <= len(batch.lanes):
                self._repack(others)

    def _copy(self, lane: int, to: int, start: int, end: int) -> None:
        """Lane `to` gets tokens behind those that it has."""
        batch = self._batch_of([to])
        sources, at, columns = self._row(lane)
        taken = columns[start:end]
        width = batch.columns + len(taken)
        batch.reserve(width)
        for target, old, source in zip(batch.targets(width), batch.arrays(), sources, strict=True):
            target[:, :, : batch.columns] = old
            target[0, :, batch.columns :] = source[at][:, taken]
        batch.commit(np.concatenate([batch.mask, np.ones((1, len(taken)), np.int64)], axis=1))

    def _rename(self, lane: int, to: int) -> None:
        self._remove([to])
        batch = self._batches.pop(lane)
        batch.lanes[batch.lanes.index(lane)] = to
        self._batches[to] = batch

    def _shrink(self, lane: int, end: int) -> None:
        batch = self._batches.get(lane)
        if batch is None:
            return
        if not end:
            self._remove([lane])
            return
        row, columns = batch.row(lane)
        if len(columns) > end:
            batch.mask[row, columns[end:]] = 0
            if not self._allow_gaps:
                self._repack([lane])
