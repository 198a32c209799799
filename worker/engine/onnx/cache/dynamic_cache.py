"""The cache of a graph with plain attention: every run returns the cache of its batch, longer by a column.

    batch of three lanes, decoding         columns ->
    lane 4 | t t t t t t t t t t t t
    lane 0 | t t t t t t . . . t t t      `.`: padding, hidden by the mask
    lane 7 | t t . . . . . . . t t t

Lanes that decode together are packed into a batch when they meet, each from column 0 on; every step appends a column to
all of them. A lane is in exactly one batch. The cache is in the host's memory."""

from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.engine.onnx.cache import saved_tokens
from tokenbus.worker.engine.onnx.cache.batch import LEFT, RowBatch, bucket_by_length
from tokenbus.worker.engine.onnx.cache.kv_cache import DecodeGroup, DecodeResult
from tokenbus.worker.engine.onnx.cache.lanes import Copy, LaneChange, LaneTransfer, Shrink
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.graph_runner import GraphRunner
from tokenbus.worker.engine.onnx.graphs.session import NO_ADAPTERS, AdapterInputs
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens


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
        return saved_tokens.pack([source[row][:, columns[start:end]] for source in sources])

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        saved = saved_tokens.unpack(self._graph_runner.graph.kv, data)
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

    def prompt(self, part: ScheduledTokens, *, wants_logits: bool, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
        ids = np.array(part.token_ids, np.int64)[None]
        positions = np.arange(part.start, part.start + part.num_tokens)[None]
        return self._run(self._batch_of([part.lane]), ids, positions, adapters, wants_logits=wants_logits)

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
        self, batch: RowBatch, ids: Array, positions: Array, adapters: AdapterInputs, *, wants_logits: bool = True
    ) -> Array:
        runner, has_past = self._graph_runner, batch.columns > 0
        mask = np.concatenate([batch.mask, np.ones(ids.shape, np.int64)], axis=1)
        batch.reserve(mask.shape[1])
        batch.binding = batch.binding or runner.bind()
        for kv, past, present in zip(runner.graph.kv, batch.arrays(), batch.targets(mask.shape[1]), strict=True):
            batch.binding.bind_input(kv.past, past)
            batch.binding.bind_output(kv.present, present)
        logits = runner.run(
            batch.binding, ids, mask, positions, has_past=has_past, wants_logits=wants_logits, adapters=adapters
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
