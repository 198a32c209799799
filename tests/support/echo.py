"""The ONNX engine's caches over a graph that is none: it keeps token ids for keys, and answers with what it sees."""

from collections.abc import Sequence as Listing
from typing import Any

import numpy as np

from tests.support.arithmetic import ArithmeticRunner, _next
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.moves import Move
from tokenbus.worker.engine.onnx.cache.caches import Cache
from tokenbus.worker.engine.onnx.cache.grouped import GroupedCache
from tokenbus.worker.engine.onnx.cache.lanes import Lanes
from tokenbus.worker.engine.onnx.cache.plain import PlainCache
from tokenbus.worker.engine.onnx.graphs.device import HostRows
from tokenbus.worker.engine.onnx.graphs.graph import Graph, Kv
from tokenbus.worker.engine.scheduling.plan import Part, Sampled, StepPlan
from tokenbus.worker.engine.scheduling.sequence import End

ROW_TOKENS = 64
NOTHING = -1
KV = Kv("past", "present", 1, 1, np.dtype(np.float32))


def graph(*, grouped: bool) -> Graph:
    return Graph(
        kv=(KV,),
        grouped=grouped,
        ids_dtype=np.dtype(np.int64),
        mask="attention_mask",
        positions="position_ids",
        keep_logits=None,
        cache_branch=None,
        token_types=None,
        logits="logits",
        logits_dtype=np.dtype(np.float32),
        vocab_size=ROW_TOKENS,
        hidden=None,
        pooled=None,
    )


class _Bound:
    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.first_row = 0

    def give(self, name: str, array: Any) -> None:
        self.arrays[name] = array

    take = give

    def give_at(self, name: str, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.first_row = address

    def take_at(self, name: str, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        assert address == self.first_row


class _Rows(HostRows):
    def address(self, row: int) -> int:
        return row


class EchoCaller:
    """Its logits are the token ids that a row can see, in the order of their columns."""

    most_tokens = 1 << 30

    def __init__(self, *, grouped: bool, num_rows: int = 0, can_gap: bool = True) -> None:
        self.graph = graph(grouped=grouped)
        self.rows = _Rows(KV, num_rows + 1, ROW_TOKENS)
        self._can_gap = can_gap

    def bind(self) -> _Bound:
        return _Bound()

    def run(
        self, binding: _Bound, ids: Any, mask: Any, positions: Any, *, has_past: bool, wants_logits: bool = True
    ) -> Any:
        seen = np.full((len(ids), ROW_TOKENS), NOTHING, np.float32)
        count = ids.shape[1]
        if not self.graph.grouped:
            columns = mask.shape[1] - count
            present = binding.arrays["present"]
            present[:, :, :columns] = binding.arrays["past"]
            present[:, 0, columns:, 0] = ids
        for row, (new, shown, places) in enumerate(zip(ids, np.asarray(mask, bool), positions, strict=True)):
            assert places.tolist() == list(range(int(shown.sum()) - count, int(shown.sum()))), "positions"
            if self.graph.grouped:
                assert shown[: shown.sum()].all(), "a row has to begin at column 0"
                memory = self.rows._array[binding.first_row + row, 0, :, 0]
                memory[places] = new
                visible = memory[: shown.sum()]
            else:
                assert self._can_gap or shown.all(), "a gap"
                visible = present[row, 0, shown, 0]
            seen[row, : len(visible)] = visible
        return seen if wants_logits else seen[:0]


class EchoRunner(ArithmeticRunner):
    """An arithmetic runner whose lanes are those of a cache of the ONNX engine."""

    def __init__(self, config: contract.EngineConfig, num_lanes: int, *, kind: str) -> None:
        super().__init__(config, num_lanes=num_lanes)
        self.lengths = Lanes(num_lanes)
        grouped, can_gap = kind == "grouped", kind != "plain without gaps"
        caller: Any = EchoCaller(grouped=grouped, num_rows=num_lanes, can_gap=can_gap)
        self.cache: Cache = (
            GroupedCache(caller, [caller.rows], self.lengths) if grouped else PlainCache(caller, 9, can_gap=can_gap)
        )

    def apply(self, moves: Listing[Move]) -> None:
        self.cache.apply(self.lengths.resolve(moves))

    def step(self, plan: StepPlan) -> list[Sampled | End]:
        decodes = [part for part in plan.parts if part.num_tokens == 1 and part.start and part.samples]
        seen: dict[int, Any] = {}
        if decodes:
            in_rows, logits = self.cache.decode(decodes)
            assert len(in_rows) == len(decodes)
            seen = {part.lane: row for part, row in zip(in_rows, logits, strict=True)}
        for part in plan.parts:
            if part not in decodes:
                seen[part.lane] = self.cache.prompt(part, wants_logits=True)[0]
            self.lengths.grow(part.lane, part.start, part.start + part.num_tokens)
        return [Sampled(self._answer(part, seen[part.lane])) for part in plan.parts if self._is_right(part, seen)]

    def _is_right(self, part: Part, seen: dict[int, Any]) -> bool:
        tokens = [int(token) for token in seen[part.lane] if token != NOTHING]
        assert tokens == list(part.sequence.token_ids[: part.start + part.num_tokens]), "tokens of another sequence"
        return part.samples

    def _answer(self, part: Part, seen: Any) -> int:
        sequence = part.sequence
        return _next(self._samplers[sequence.seq_no], sequence.token_ids[: sequence.num_tokens], sequence)

    def is_empty(self) -> bool:
        return not any(self.lengths.lengths)
