"""The ONNX engine's caches over a fake graph, which stores token ids as keys and answers with those that it sees."""

from collections.abc import Sequence as Listing
from typing import Any

import numpy as np

from tests.support.arithmetic import ArithmeticRunner, next_token
from tokenbus.worker.contract import contract
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.onnx import kv_cache
from tokenbus.worker.engine.onnx.dynamic_cache import DynamicCache
from tokenbus.worker.engine.onnx.graph import Graph, KvTensor
from tokenbus.worker.engine.onnx.kv_cache import DecodeGroup, KvCache, LaneLengths
from tokenbus.worker.engine.onnx.static_cache import HostRows, StaticCache
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, ScheduledTokens, StepPlan

ROW_TOKENS = 64
NOTHING = -1
KV = KvTensor("past", "present", 1, 1, np.dtype(np.float32))


def graph(*, uses_gqa: bool) -> Graph:
    return Graph(
        kv=(KV,),
        uses_gqa=uses_gqa,
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

    def bind_input(self, name: str, array: Any) -> None:
        self.arrays[name] = array

    bind_output = bind_input

    def bind_device_input(self, name: str, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.first_row = address

    def bind_device_output(self, name: str, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        assert address == self.first_row


class _Rows(HostRows):
    def address(self, row: int) -> int:
        return row

    def tokens(self, row: int) -> Any:
        """Returns the token ids in a row's keys; writing to them changes the row."""
        return self.array[row, 0, :, 0]


class EchoGraphRunner:
    """Returns as logits the token ids that a row can see, in the order of their columns."""

    max_row_tokens = 1 << 30

    def __init__(self, *, uses_gqa: bool, num_rows: int = 0, allow_gaps: bool = True) -> None:
        self.graph = graph(uses_gqa=uses_gqa)
        self.rows = _Rows(KV, num_rows + 1, ROW_TOKENS)
        self._allow_gaps = allow_gaps

    def bind(self) -> _Bound:
        return _Bound()

    def run(
        self,
        binding: _Bound,
        ids: Any,
        mask: Any,
        positions: Any,
        *,
        has_past: bool,
        num_logits: int = 1,
        adapters: Any = None,
    ) -> Any:
        seen = np.full((len(ids), ROW_TOKENS), NOTHING, np.float32)
        count = ids.shape[1]
        if not self.graph.uses_gqa:
            columns = mask.shape[1] - count
            present = binding.arrays["present"]
            present[:, :, :columns] = binding.arrays["past"]
            present[:, 0, columns:, 0] = ids
        for row, (new, shown, places) in enumerate(zip(ids, np.asarray(mask, bool), positions, strict=True)):
            assert places.tolist() == list(range(int(shown.sum()) - count, int(shown.sum()))), "positions"
            if self.graph.uses_gqa:
                assert shown[: shown.sum()].all(), "a row has to begin at column 0"
                memory = self.rows.tokens(binding.first_row + row)
                memory[places] = new
                visible = memory[: shown.sum()]
            else:
                assert self._allow_gaps or shown.all(), "a gap"
                visible = present[row, 0, shown, 0]
            seen[row, : len(visible)] = visible
        return seen if num_logits else seen[:0]


class EchoRunner(ArithmeticRunner):
    """An arithmetic runner whose lanes are in a cache of the ONNX engine."""

    def __init__(self, config: contract.EngineConfig, num_lanes: int, *, kind: str) -> None:
        super().__init__(config, num_lanes=num_lanes)
        self.lengths = LaneLengths(num_lanes)
        uses_gqa, allow_gaps = kind == "gqa", kind != "plain without gaps"
        graph_runner: Any = EchoGraphRunner(uses_gqa=uses_gqa, num_rows=num_lanes, allow_gaps=allow_gaps)
        self.cache: KvCache = (
            StaticCache(graph_runner, [graph_runner.rows], self.lengths)
            if uses_gqa
            else DynamicCache(graph_runner, 9, allow_gaps=allow_gaps)
        )

    def saved(self, tokens: dict[int, int]) -> bytes:
        return np.array([tokens[place] for place in sorted(tokens)], np.float32).tobytes()

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        kv_cache.apply_changes(
            self.lengths.resolve(kv_ops), self.cache, self.opened_copies() if self.copies is not None else None
        )

    def step(self, plan: StepPlan) -> list[Outcome]:
        decodes = [part for part in plan.scheduled if part.num_tokens == 1 and part.start and part.samples]
        seen: dict[int, Any] = {}
        if decodes:
            ((in_rows, logits),) = self.cache.decode([DecodeGroup(decodes)])
            assert len(in_rows) == len(decodes)
            seen = {part.lane: row for part, row in zip(in_rows, logits, strict=True)}
        for part in plan.scheduled:
            if part not in decodes:
                seen[part.lane] = self.cache.prompt(part, num_logits=1)[0]
            self.lengths.grow(part.lane, part.start, part.start + part.num_tokens)
        return [self._outcome(part, seen[part.lane]) for part in plan.scheduled]

    def _outcome(self, part: ScheduledTokens, seen: Any) -> Outcome:
        tokens = [int(token) for token in seen if token != NOTHING]
        assert tokens == list(part.sequence.token_ids[: part.start + part.num_tokens]), "tokens of another sequence"
        return SampledToken(self._answer(part, seen)) if part.samples else None

    def _answer(self, part: ScheduledTokens, seen: Any) -> int:
        sequence = part.sequence
        return next_token(self._samplers[sequence.seq_no], sequence.token_ids[: sequence.num_tokens], sequence)

    def is_empty(self) -> bool:
        return not any(self.lengths.lengths) and not self.copies
