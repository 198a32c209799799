"""The cache of a graph with GroupQueryAttention: rows of fixed length, read and written in place, on the host or a GPU.

Past and present are bound to the same memory, with a row for each lane. One run computes a token for each of the first
rows, whose lengths may differ; sequences with other adapters are in the rows after them, and in separate runs. The
tokens of a prompt are computed by a run over its row alone, because such a graph takes more than one token after a past
only for a single row."""

import math
from collections.abc import Container
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from tokenbus.protocol.process import memory
from tokenbus.worker.engine.onnx import kv_cache
from tokenbus.worker.engine.onnx.device import EXECUTION_PROVIDERS, Device
from tokenbus.worker.engine.onnx.graph import Array, KvTensor
from tokenbus.worker.engine.onnx.kv_cache import (
    Copy,
    DecodeGroup,
    DecodeResult,
    LaneChange,
    LaneLengths,
    LaneTransfer,
    Shrink,
)
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs, Binding, GraphRunner
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens

_SLACK_TOKENS = 256
"""A row that has become shorter may still take memory for this many tokens."""


class RowMemory(Protocol):
    """The rows of one tensor of the cache, each of (heads, tokens, width), contiguous."""

    row_shape: tuple[int, int, int]

    def address(self, row: int) -> int:
        """Returns the address of a row."""
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies the tokens `start` to `end` of a row to another; the tokens after them may change there too."""
        ...

    def erase(self, row: int, start: int, end: int) -> None:
        """Overwrites the tokens `start` to `end` of a row."""
        ...

    def release(self, row: int, start: int = 0) -> None:
        """Returns the memory of a row's tokens from `start` on to the system; it is zero when used again."""
        ...

    def view(self, row: int) -> Array:
        """Returns a row's memory, which must be in host memory."""
        ...


class HostRows:
    """Rows in host memory, which is allocated only as they are written.

    Small pages: with a long context, each head of each tensor would otherwise take a huge page for its first tokens."""

    def __init__(self, kv: KvTensor, num_rows: int, row_tokens: int) -> None:
        self.row_shape = (kv.heads, row_tokens, kv.width)
        self.array = np.zeros((num_rows, *self.row_shape), kv.dtype)
        memory.use_small_pages(self.address(0), self.array.nbytes)

    def address(self, row: int) -> int:
        return int(self.array.ctypes.data) + row * self.array.strides[0]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.array[target, :, start:end] = self.array[source, :, start:end]

    def erase(self, row: int, start: int, end: int) -> None:
        self.array[row, :, start:end] = 0

    def release(self, row: int, start: int = 0) -> None:
        if not start:
            memory.release_pages(self.address(row), self.array.strides[0])
            return
        _, head_bytes, token_bytes, _ = self.array.strides
        for head in range(self.row_shape[0]):
            first = self.address(row) + head * head_bytes + start * token_bytes
            memory.release_pages(first, head_bytes - start * token_bytes)

    def view(self, row: int) -> Array:
        tokens: Array = self.array[row]
        return tokens


class DeviceRows:
    """Rows in a GPU's memory. A whole row is copied at a time, by a graph that does nothing else."""

    def __init__(self, kv: KvTensor, num_rows: int, row_tokens: int, device: Device, copier: Any) -> None:
        self.row_shape = (kv.heads, row_tokens, kv.width)
        self._size = math.prod(self.row_shape)
        self._dtype = kv.dtype
        self._device = device
        self._copier = copier
        zeros = np.zeros((num_rows, *self.row_shape), kv.dtype)
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(zeros, device.kind, device.number)

    def address(self, row: int) -> int:
        return int(self._value.data_ptr()) + row * self._size * self._dtype.itemsize

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        binding = self._copier.io_binding()
        place = (self._device.kind, self._device.number, self._dtype.type, (self._size,))
        binding.bind_input("x", *place, self.address(source))
        binding.bind_output("y", *place, self.address(target))
        self._copier.run_with_iobinding(binding)

    def erase(self, row: int, start: int, end: int) -> None:
        pass  # GroupQueryAttention reads no token after a row's length, and no row but its own

    def release(self, row: int, start: int = 0) -> None:
        raise AssertionError("rows in a GPU's memory are not lent")

    def view(self, row: int) -> Array:
        raise AssertionError("the rows are in a GPU's memory, of which nothing is copied to the host")


def allocate_rows(kv: tuple[KvTensor, ...], num_rows: int, row_tokens: int, device: Device) -> list[RowMemory]:
    """Allocates memory for every tensor of a cache.

    Raises MemoryError, and whatever onnxruntime raises when a GPU has no room."""
    if device.kind == "cpu":
        return [HostRows(one, num_rows, row_tokens) for one in kv]
    copiers = {one.dtype: _copier(one, device) for one in kv}
    return [DeviceRows(one, num_rows, row_tokens, device, copiers[one.dtype]) for one in kv]


def _copier(kv: KvTensor, device: Device) -> Any:
    """Returns a session that copies a tensor on the GPU, for which onnxruntime offers no call."""
    element = TensorProto.FLOAT16 if kv.dtype == np.float16 else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, element, ["size"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "copy", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    providers = [(EXECUTION_PROVIDERS[device.kind], {"device_id": str(device.number)})]
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)


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
        for rows in self._memory:
            rows.erase(row, end, self._written[row])

    def save(self, lane: int, start: int, end: int) -> bytes:
        row = self._rows.row_of(lane)
        return kv_cache.pack_tokens([rows.view(row)[:, start:end] for rows in self._memory])

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        row = self._rows.row_of(lane)
        self._note(row, end)
        for rows, saved in zip(self._memory, kv_cache.unpack_tokens(self._graph_runner.graph.kv, data), strict=True):
            rows.view(row)[:, start:end] = saved[:, : end - start]

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

    def prompt(self, part: ScheduledTokens, *, num_logits: int, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
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
            num_logits=num_logits,
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
            for rows in self._memory:
                rows.release(row, length)
            self._written[row] = length

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        self._note(target, end)
        for rows in self._memory:
            rows.copy(source, target, start, end)

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
