"""Calls a graph: gives it what it asks for beside the cache, and takes its logits."""

import numpy as np

from tokenbus.worker.engine.onnx.arrays import Array
from tokenbus.worker.engine.onnx.graphs.graph import Graph
from tokenbus.worker.engine.onnx.graphs.session import Binding, Session

_MAX_LOGITS = 64 << 20
"""Values of one run's logits, where a graph computes them for every token: 256 MiB."""


class GraphRunner:
    """`last_logits_only`: the graph computes logits for the last token of each row alone."""

    def __init__(self, graph: Graph, session: Session, vocab_size: int, *, last_logits_only: bool) -> None:
        self.graph = graph
        self._session = session
        self._vocab_size = vocab_size
        self._last_logits_only = last_logits_only or graph.keep_logits is not None

    def __repr__(self) -> str:
        return f"<Caller of {self._session!r}>"

    @property
    def max_row_tokens(self) -> int:
        """Tokens of one row that a run may compute."""
        return 1 << 30 if self._last_logits_only else max(1, _MAX_LOGITS // self._vocab_size)

    def bind(self) -> Binding:
        return self._session.bind()

    def run(
        self, binding: Binding, ids: Array, mask: Array, positions: Array, *, has_past: bool, wants_logits: bool = True
    ) -> Array:
        """The logits behind the last token of each row, (rows, vocabulary); none, if they are not wanted.

        `ids` and `positions` are (rows, tokens), `mask` is (rows, columns of past and tokens). Raises
        InsufficientMemoryError and
        DeviceError."""
        graph = self.graph
        binding.bind_input(*self._named("input_ids", ids))
        for name, array in ((graph.mask, mask), (graph.positions, positions)):
            if name is not None:
                binding.bind_input(*self._named(name, array))
        if graph.keep_logits is not None:
            binding.bind_input(graph.keep_logits, np.array(1, np.int64))
        if graph.cache_branch is not None:
            binding.bind_input(graph.cache_branch, np.array([has_past]))
        assert graph.logits is not None
        rows, count = ids.shape
        shape = (rows, 1 if self._last_logits_only else count, self._vocab_size)
        logits: Array = np.empty(shape, graph.logits_dtype)
        if wants_logits:
            binding.bind_output(graph.logits, logits)
        self._session.run(binding)
        last: Array = logits[:, -1] if wants_logits else logits[:0, -1]
        return last if last.dtype == np.float32 else last.astype(np.float32)

    def _named(self, name: str, array: Array) -> tuple[str, Array]:
        return name, np.ascontiguousarray(array, self.graph.ids_dtype)
