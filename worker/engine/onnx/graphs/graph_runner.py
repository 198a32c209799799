"""Runs a graph: binds every input that is not the cache, and returns the logits."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.graph import Graph
from tokenbus.worker.engine.onnx.graphs.session import NO_ADAPTERS, AdapterInputs, Binding, Session

_MAX_LOGITS = 64 << 20
"""The most logits that one run may compute, 256 MiB, if a graph computes those of every token."""


class _Loaded(NamedTuple):
    """A session, and the arrays to which its adapter inputs are bound without adapters."""

    session: Session
    no_adapters: AdapterInputs


class GraphRunner:
    """A loaded graph. `last_logits_only` says whether it was changed to compute only the last token's logits."""

    def __init__(self, graph: Graph, session: Session, vocab_size: int, *, last_logits_only: bool) -> None:
        self.graph = graph
        self._loaded = _Loaded(session, NO_ADAPTERS)
        self._vocab_size = vocab_size
        self._last_logits_only = last_logits_only or graph.keep_logits is not None

    def __repr__(self) -> str:
        return f"<GraphRunner of {self._loaded.session!r}>"

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of one row that a run may compute."""
        return 1 << 30 if self._last_logits_only else max(1, _MAX_LOGITS // self._vocab_size)

    @property
    def session(self) -> Session:
        """The session of new bindings."""
        return self._loaded.session

    def replace(self, session: Session, no_adapters: Mapping[str, Array]) -> None:
        """Switches to a session of the same graph with inputs for adapters. Earlier bindings stay valid, and keep their
        session alive. May be called from any thread."""
        self._loaded = _Loaded(session, {name: session.tensor(array) for name, array in no_adapters.items()})

    def bind(self) -> Binding:
        """Returns a binding to which the caller binds the cache."""
        session, no_adapters = self._loaded
        return session.bind(no_adapters)

    def bind_inputs(self, binding: Binding, ids: Array, mask: Array, positions: Array, *, has_past: bool) -> None:
        """Binds the inputs that the graph has. `ids` and `positions` are of (rows, tokens), `mask` of (rows, columns of
        past and tokens)."""
        graph = self.graph
        for name, array in (("input_ids", ids), (graph.mask, mask), (graph.positions, positions)):
            if name is not None:
                binding.bind_input(name, np.ascontiguousarray(array, graph.ids_dtype))
        if graph.token_types is not None:
            binding.bind_input(graph.token_types, np.zeros(ids.shape, graph.ids_dtype))
        if graph.keep_logits is not None:
            binding.bind_input(graph.keep_logits, np.array(1, np.int64))
        if graph.cache_branch is not None:
            binding.bind_input(graph.cache_branch, np.array([has_past]))

    def run(
        self,
        binding: Binding,
        ids: Array,
        mask: Array,
        positions: Array,
        *,
        has_past: bool,
        wants_logits: bool = True,
        adapters: AdapterInputs = NO_ADAPTERS,
    ) -> Array:
        """Returns the logits after the last token of each row, of (rows, vocabulary); no rows if they are not
        requested.

        The inputs are those of `bind_inputs`, and the adapters of all rows. Raises InsufficientMemoryError and
        DeviceError."""
        graph = self.graph
        assert graph.logits is not None
        self.bind_inputs(binding, ids, mask, positions, has_past=has_past)
        binding.bind_adapters(adapters)
        rows, count = ids.shape
        shape = (rows, 1 if self._last_logits_only else count, self._vocab_size)
        logits: Array = np.empty(shape, graph.logits_dtype)
        if wants_logits:
            binding.bind_output(graph.logits, logits)
        binding.run()
        last: Array = logits[:, -1] if wants_logits else logits[:0, -1]
        return last if last.dtype == np.float32 else last.astype(np.float32)
