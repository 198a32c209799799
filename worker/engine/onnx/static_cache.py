"""TODO"""

from collections.abc import Container
from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np

from tokenbus.worker.engine.onnx import kv_cache
from tokenbus.worker.engine.onnx.graph import Array
from tokenbus.worker.engine.onnx.kv_cache import DecodeGroup, DecodeResult
from tokenbus.worker.engine.onnx.lanes import Copy, LaneChange, LaneLengths, LaneTransfer, Shrink
from tokenbus.worker.engine.onnx.row_memory import RowMemory
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs, Binding, GraphRunner
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens


class RowCopy(NamedTuple):
    """The first `num_tokens` tokens of row `source` are copied to row `target`."""

    source: int
    target: int
    num_tokens: int


class RowTable:
    """The rows of `num_lanes` lanes, and a spare row after them through which two full rows are exchanged.

    Lanes that decode together must be adjacent, from row 0 on:

        rows    | 0 1 2        | 3 4         | 5   6   7   8                    |
        lanes   | decode (one  | decode (the | prompts, cached prefixes, empty  |
                |  group)      |  next)      |

    A batch is a run of rows without gaps, since even an empty row in it costs the work of a row. A lane that starts or
    stops decoding costs a copy or two; an empty lane changes rows for free (decision 0029).

    `lengths` are those of the lanes, in tokens; the code that computes tokens updates them."""

    def __init__(self, num_lanes: int, lengths: Listing[int]) -> None:
        self._row_of = list(range(num_lanes))
        self._lane_at = list(range(num_lanes))
        self._lengths = lengths
        self.spare = num_lanes

    def __repr__(self) -> str:
        return f"<RowTable {self._lane_at}>"

    def row_of(self, lane: int) -> int:
        return self._row_of[lane]

    def lane_at(self, row: int) -> int:
        """Returns the lane of a row; the spare row has none, which is one more than the last."""
        return self._lane_at[row] if row != self.spare else self.spare

    def claim_first_free_row(self, lane: int) -> None:
        """Moves an empty lane to the first empty row, because the sequence in it will decode in the first rows."""
        assert not self._lengths[lane], lane
        first = next(row for row, other in enumerate(self._lane_at) if not self._lengths[other])
        if first < self._row_of[lane]:
            self.swap(lane, self._lane_at[first])

    def swap(self, one: int, other: int) -> None:
        """Exchanges the rows of two lanes; each then has the other's contents."""
        a, b = self._row_of[one], self._row_of[other]
        self._row_of[one], self._row_of[other] = b, a
        self._lane_at[a], self._lane_at[b] = other, one

    def gather(self, groups: Listing[Listing[int]]) -> list[RowCopy]:
        """Moves groups of lanes to the first rows, one group after another. Returns the necessary copies, in order."""
        copies: list[RowCopy] = []
        first = 0
        for lanes in groups:
            copies += self._gather(lanes, range(first, first + len(lanes)))
            first += len(lanes)
        return copies

    def _gather(self, lanes: Listing[int], rows: range) -> list[RowCopy]:
        wanted = set(lanes)
        assert len(wanted) == len(lanes), lanes
        # The number of these rows held by others equals the number of wanted lanes outside them.
        holes = [row for row in rows if self._lane_at[row] not in wanted]
        outside = [lane for lane in lanes if self._row_of[lane] not in rows]
        return [copy for hole, lane in zip(holes, outside, strict=True) for copy in self._move(lane, hole)]

    def check_integrity(self) -> None:
        assert sorted(self._row_of) == list(range(len(self._row_of))), self
        assert all(self._lane_at[row] == lane for lane, row in enumerate(self._row_of)), self

    def _move(self, lane: int, row: int) -> list[RowCopy]:
        other, left = self._lane_at[row], self._row_of[lane]
        moved = RowCopy(left, row, self._lengths[lane])
        if not self._lengths[other]:
            self.swap(lane, other)
            return [moved]
        # The row is occupied: its lane moves to the last empty row, or swaps through the spare row.
        empty = next((last for last in reversed(self._lane_at) if not self._lengths[last]), None)
        if empty is None:
            self.swap(lane, other)
            length = self._lengths[other]
            return [RowCopy(row, self.spare, length), moved, RowCopy(self.spare, left, length)]
        out = RowCopy(row, self._row_of[empty], self._lengths[other])
        self.swap(other, empty)
        self.swap(lane, empty)
        return [out, moved]


_SLACK_TOKENS = 256
"""A row that has become shorter may still take memory for this many tokens."""


class StaticCache:
    """`memory` has one entry for each tensor of the cache, with one row more than there are lanes. If it is releasable,
    rows must take none beyond the tokens of their lanes."""

    def __init__(
        self, graph_runner: GraphRunner, memory: Listing[RowMemory], lanes: LaneLengths, *, is_releasable: bool = False
    ) -> None:
        self._graph_runner = graph_runner
        self._memory = memory
        self._lanes = lanes
        self._rows = RowTable(len(lanes.lengths), lanes.lengths)
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._is_releasable = is_releasable
        self._written = [0] * (len(lanes.lengths) + 1)
        """The tokens for which each row takes memory."""
        if is_releasable:  # the heap clears reused memory by writing to it
            for row in range(len(self._written)):
                for one in memory:
                    one.release(row)

    def __repr__(self) -> str:
        return f"<StaticCache {self._lanes!r} {self._rows!r}>"

    @property
    def held_tokens(self) -> int:
        return sum(self._written)

    def apply(self, changes: Listing[LaneChange]) -> None:
        for change in changes:
            match change:
                case Copy(lane, to, start, end):
                    self._copy(self._rows.row_of(lane), self._rows.row_of(to), start, end)
                case LaneTransfer(lane, to):
                    self._rows.swap(lane, to)
                case Shrink():
                    pass  # nothing reads beyond a lane's length

    def erase(self, lane: int, end: int) -> None:
        row = self._rows.row_of(lane)
        for memory in self._memory:
            memory.erase(row, end, self._written[row])

    def save(self, lane: int, start: int, end: int) -> bytes:
        row = self._rows.row_of(lane)
        return kv_cache.pack_tokens([memory.view(row)[:, start:end] for memory in self._memory])

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        row = self._rows.row_of(lane)
        self._note(row, end)
        for memory, saved in zip(self._memory, kv_cache.unpack_tokens(self._graph_runner.graph.kv, data), strict=True):
            memory.view(row)[:, start:end] = saved[:, : end - start]

    def decode(self, groups: Listing[DecodeGroup]) -> list[DecodeResult]:
        copies = self._rows.gather([[part.lane for part in group.parts] for group in groups])
        for place, copy in enumerate(copies, start=1):
            self._copy(copy.source, copy.target, 0, copy.num_tokens)
            if self._is_releasable:  # an abandoned row takes no memory, unless it is still to be copied
                self._release_unused({later.source for later in copies[place:]})
        return [self._decode(group) for group in groups]

    def _decode(self, group: DecodeGroup) -> DecodeResult:
        parts = group.parts
        first = min(self._rows.row_of(part.lane) for part in parts)
        in_rows = sorted(parts, key=lambda part: self._rows.row_of(part.lane))
        ids = np.array([[part.token_ids[0]] for part in in_rows])
        starts = np.array([[part.start] for part in in_rows])
        for part in in_rows:
            self._note(self._rows.row_of(part.lane), part.start + 1)
        # Such a graph takes the length of each row from the sum of its mask.
        mask = np.arange(starts.max() + 1) <= starts
        binding = self._binding(first, len(parts))
        logits = self._graph_runner.run(binding, ids, mask, starts, has_past=True, adapters=group.adapters)
        return DecodeResult(in_rows, logits)

    def prompt(self, part: ScheduledTokens, *, wants_logits: bool, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
        if not part.start:
            self._rows.claim_first_free_row(part.lane)
        row = self._rows.row_of(part.lane)
        columns = np.arange(part.start + part.num_tokens)[None]
        self._note(row, columns.size)
        return self._graph_runner.run(
            self._binding(row, 1),
            np.array(part.token_ids, np.int64)[None],
            np.ones_like(columns),
            columns[:, part.start :],
            has_past=part.start > 0,
            wants_logits=wants_logits,
            adapters=adapters,
        )

    def release_lanes(self) -> bool:
        self._release_unused(set())
        return False

    def drop_bindings(self) -> None:
        self._bindings.clear()

    def _note(self, row: int, end: int) -> None:
        """Notes that the tokens of a row up to `end` are written."""
        if end > self._written[row]:
            self._written[row] = end

    def _release_unused(self, kept: Container[int]) -> None:
        """Releases what rows take beyond the tokens of their lanes, except these rows."""
        lengths = [*self._lanes.lengths, 0]
        for row, written in enumerate(self._written):
            length = lengths[self._rows.lane_at(row)]
            if written <= length + (_SLACK_TOKENS if length else 0) or row in kept:
                continue
            for memory in self._memory:
                memory.release(row, length)
            self._written[row] = length

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        self._note(target, end)
        for memory in self._memory:
            memory.copy(source, target, start, end)

    def _binding(self, first: int, count: int) -> Binding:
        """Returns a binding with the cache of these rows, made once for all steps."""
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = self._graph_runner.bind()
            for kv, memory in zip(self._graph_runner.graph.kv, self._memory, strict=True):
                address, shape = memory.address(first), (count, *memory.row_shape)
                binding.bind_device_input(kv.past, address, shape, kv.dtype)
                binding.bind_device_output(kv.present, address, shape, kv.dtype)
        return binding
