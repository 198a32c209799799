"""The cache of a graph with plain attention: every run returns the cache of its batch, longer by a column.

    batch of three lanes, decoding         columns ->
    lane 4 | t t t t t t t t t t t t
    lane 0 | t t t t t t . . . t t t      `.`: padding, hidden by the mask
    lane 7 | t t . . . . . . . t t t

Lanes that decode together are packed into a batch when they meet, each from column 0 on; every step appends a column to
all of them. A lane is in exactly one batch. The cache is in the host's memory."""

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.contract.engine_errors import InsufficientMemoryError
from tokenbus.worker.engine.onnx import kv_cache
from tokenbus.worker.engine.onnx.graph import Array, KvTensor
from tokenbus.worker.engine.onnx.kv_cache import Copy, DecodeGroup, DecodeResult, LaneChange, LaneTransfer, Shrink
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs, Binding, GraphRunner
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens

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


class DynamicCache:
    """`allow_gaps` says whether rows may have padding. A graph that counts its positions itself can't have any."""

    def __init__(self, graph_runner: GraphRunner, max_paddings: int, *, allow_gaps: bool) -> None:
        self._graph_runner = graph_runner
        self._max_paddings = max_paddings if allow_gaps else 0
        self._allow_gaps = allow_gaps
        self._batches: dict[int, RowBatch] = {}
        self._has_freed = False
        """Whether a batch was dropped since `release_lanes` was called."""

    def __repr__(self) -> str:
        return f"<DynamicCache {set(self._batches.values())}>"

    @property
    def held_tokens(self) -> int:
        return sum(len(batch.lanes) * batch.columns for batch in set(self._batches.values()))

    def apply(self, changes: Listing[LaneChange]) -> None:
        for change in changes:
            match change:
                case Copy(lane, to, start, end):
                    self._copy(lane, to, start, end)
                case LaneTransfer(lane, to, end):
                    # No tokens move: from now on `to` owns the row of `lane`.
                    self._remove([to])
                    batch = self._batches.pop(lane)
                    batch.lanes[batch.lanes.index(lane)] = to
                    self._batches[to] = batch
                    self._shrink(to, end)
                case Shrink(lane, end):
                    self._shrink(lane, end)

    def erase(self, lane: int, end: int) -> None:
        sources, row, columns = self._tokens_of(lane)
        for source in sources:
            source[row][:, columns[end:]] = 0
        self._shrink(lane, end)

    def save(self, lane: int, start: int, end: int) -> bytes:
        sources, row, columns = self._tokens_of(lane)
        return kv_cache.pack_tokens([source[row][:, columns[start:end]] for source in sources])

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        saved = kv_cache.unpack_tokens(self._graph_runner.graph.kv, data)
        self._append(lane, [array[:, : end - start] for array in saved], end - start)

    def decode(self, groups: Listing[DecodeGroup]) -> list[DecodeResult]:
        return [self._decode(parts, adapters) for parts, adapters in groups]

    def _decode(self, parts: Listing[ScheduledTokens], adapters: AdapterInputs) -> DecodeResult:
        by_lane = {part.lane: part for part in parts}
        in_rows: list[ScheduledTokens] = []
        found: list[Array] = []
        for lanes in bucket_by_length({part.lane: part.start for part in parts}, self._max_paddings):
            batch = self._batch_of(lanes)
            rows = [by_lane[lane] for lane in batch.lanes]
            ids = np.array([[part.token_ids[0]] for part in rows])
            positions = np.array([[part.start] for part in rows])
            found.append(self._run(batch, ids, positions, adapters))
            in_rows += rows
        return DecodeResult(in_rows, found[0] if len(found) == 1 else np.concatenate(found))

    def prompt(self, part: ScheduledTokens, *, num_logits: int, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
        ids = np.array(part.token_ids, np.int64)[None]
        positions = np.arange(part.start, part.start + part.num_tokens)[None]
        return self._run(self._batch_of([part.lane]), ids, positions, adapters, num_logits=num_logits)

    def release_lanes(self) -> bool:
        for batch in set(self._batches.values()):
            if LEFT in batch.lanes:
                self._pack([lane for lane in batch.lanes if lane != LEFT])
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def drop_bindings(self) -> None:
        for batch in self._batches.values():
            batch.binding = None

    def _run(
        self, batch: RowBatch, ids: Array, positions: Array, adapters: AdapterInputs, *, num_logits: int = 1
    ) -> Array:
        runner, has_past = self._graph_runner, batch.columns > 0
        mask = np.concatenate([batch.mask, np.ones(ids.shape, np.int64)], axis=1)
        batch.reserve(mask.shape[1])
        batch.binding = batch.binding or runner.bind()
        for kv, past, present in zip(runner.graph.kv, batch.arrays(), batch.targets(mask.shape[1]), strict=True):
            batch.binding.bind_input(kv.past, past)
            batch.binding.bind_output(kv.present, present)
        logits = runner.run(
            batch.binding, ids, mask, positions, has_past=has_past, num_logits=num_logits, adapters=adapters
        )
        batch.commit(mask)
        return logits

    def _batch_of(self, lanes: list[int]) -> RowBatch:
        """Returns a batch of exactly these lanes, packing one if there is none."""
        batch = self._batches.get(lanes[0])
        return batch if batch is not None and set(batch.lanes) == set(lanes) else self._pack(lanes)

    def _pack(self, lanes: list[int]) -> RowBatch:
        """Copies lanes from their batches into a new one, each from column 0 on."""
        found = [self._tokens_of(lane) for lane in lanes]
        width = max(len(columns) for _, _, columns in found)
        mask = np.zeros((len(lanes), width), np.int64)
        for row, (_, _, columns) in enumerate(found):
            mask[row, : len(columns)] = 1
        batch = RowBatch(self._graph_runner.graph.kv, list(lanes), mask)
        batch.reserve(width)
        for tensor, target in enumerate(batch.arrays()):
            for row, (source, at, columns) in enumerate(found):
                target[row, :, : len(columns)] = source[tensor][at][:, columns] if len(columns) else 0
                # The mask makes attention multiply padding by 0, which is NaN if the memory holds infinity or NaN.
                target[row, :, len(columns) :] = 0
        self._remove(lanes)
        self._batches |= dict.fromkeys(lanes, batch)
        return batch

    def _tokens_of(self, lane: int) -> tuple[list[Array], int, Array]:
        """Returns the arrays of a lane's batch, its row in them, and the columns in which it has tokens."""
        batch = self._batches.get(lane)
        return ([], 0, np.empty(0, np.int64)) if batch is None else (batch.arrays(), *batch.row(lane))

    def _remove(self, lanes: list[int]) -> None:
        """Takes lanes out of their batches. A batch that is then half empty is repacked."""
        self._has_freed = True
        left = {batch for lane in lanes if (batch := self._batches.pop(lane, None)) is not None}
        for batch in left:
            batch.lanes = [LEFT if lane in lanes else lane for lane in batch.lanes]
            others = [lane for lane in batch.lanes if lane != LEFT]
            # Every row costs work in each run, and memory, whether or not a lane is in it.
            if others and 2 * len(others) <= len(batch.lanes):
                self._pack(others)

    def _copy(self, lane: int, to: int, start: int, end: int) -> None:
        """Appends tokens of one lane to another, which gets its own batch."""
        self._batch_of([to])  # packed first: that may move the other lane's row
        sources, at, columns = self._tokens_of(lane)
        taken = columns[start:end]
        self._append(to, [source[at][:, taken] for source in sources], len(taken))

    def _append(self, lane: int, tokens: Listing[Array], count: int) -> None:
        """Appends `count` tokens, of (heads, tokens, width) for each tensor, to a lane in its own batch."""
        batch = self._batch_of([lane])
        width = batch.columns + count
        batch.reserve(width)
        for target, old, added in zip(batch.targets(width), batch.arrays(), tokens, strict=True):
            target[:, :, : batch.columns] = old
            target[0, :, batch.columns :] = added
        batch.commit(np.concatenate([batch.mask, np.ones((1, count), np.int64)], axis=1))

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
            if not self._allow_gaps:  # the columns have to go, so the lane can't stay with longer ones
                self._pack([lane])
