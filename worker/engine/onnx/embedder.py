"""Embeddings by an ONNX graph: of an encoder's states, of a generating model's hidden ones, or as it pools them."""

from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.engine.draws import Matrix
from tokenbus.worker.engine.onnx import pooling
from tokenbus.worker.engine.onnx.graphs.graph import Graph
from tokenbus.worker.engine.onnx.graphs.session import Session
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.tokenizer.onnx_tokenizer import OnnxTokenizer
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

_CLOSE = 1e-2
"""Of a vector's length: how far it may be from itself when it is computed in a batch."""


def make_embedder(model: OnnxModel, settings: EngineSettings, *, max_input_tokens: int) -> "OnnxEmbedder":
    """Raises ModelError where not even a first embedding can be computed."""
    generates = model.graph.logits is not None
    mode = pooling.choose(settings.onnx.pooling, model.files.sidecars, generates=generates)
    where = str(model.files.weights)
    return OnnxEmbedder(
        model.graph, model.session, model.tokenizer, max_input_tokens=max_input_tokens, mode=mode, where=where
    )


class OnnxEmbedder:
    """Raises ModelError for a graph that makes no vectors."""

    def __init__(
        self, graph: Graph, session: Session, vocabulary: OnnxTokenizer, *, max_input_tokens: int, mode: str, where: str
    ) -> None:
        self.max_input_tokens = max_input_tokens
        self.vocab_size = vocabulary.size
        self._graph = graph
        self._session = session
        self._tokenizer = vocabulary
        self._mode = mode
        self._output = graph.pooled if graph.pooled is not None and graph.hidden is None else graph.hidden
        self._can_batch = False
        self.width = self._try(where)

    def __repr__(self) -> str:
        return f"<OnnxEmbedder of {self.width}, {self._mode}>"

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode_with_special_tokens(text)

    def embed(self, inputs: Listing[Listing[int]]) -> Matrix:
        if self._can_batch:
            return self._run(inputs)
        return np.concatenate([self._run([one]) for one in inputs])

    def _try(self, where: str) -> int:
        """The width of the vectors; finds out whether rows of a batch disturb each other."""
        inputs = [[place % self.vocab_size for place in range(1, count)] for count in (7, 4)]
        try:
            alone = np.concatenate([self._run([one]) for one in inputs])
            together = self._run(inputs)
        except Exception as error:  # a first run of a foreign graph fails in any way that onnxruntime knows
            raise ModelError(f"{where}: can't compute a first embedding: {error}") from error
        apart = np.linalg.norm(alone - together, axis=1)
        self._can_batch = bool((apart <= _CLOSE * np.linalg.norm(alone, axis=1)).all())
        return int(alone.shape[1])

    def _run(self, inputs: Listing[Listing[int]]) -> Matrix:
        """Rows are filled up behind their tokens, which the mask hides."""
        graph, dtype = self._graph, self._graph.ids_dtype
        lengths = np.array([len(one) for one in inputs])
        ids = np.zeros((len(inputs), lengths.max()), dtype)
        for row, one in zip(ids, inputs, strict=True):
            row[: len(one)] = one
        columns = np.broadcast_to(np.arange(ids.shape[1], dtype=dtype), ids.shape)
        binding = self._session.bind()
        binding.bind_input("input_ids", ids)
        if graph.mask is not None:
            binding.bind_input(graph.mask, (columns < lengths[:, None]).astype(dtype))
        if graph.positions is not None:
            binding.bind_input(graph.positions, np.ascontiguousarray(columns))
        if graph.token_types is not None:
            binding.bind_input(graph.token_types, np.zeros_like(ids))
        if graph.keep_logits is not None:
            binding.bind_input(graph.keep_logits, np.array(1, np.int64))
        if graph.cache_branch is not None:
            binding.bind_input(graph.cache_branch, np.array([False]))
        for kv in graph.kv:
            binding.bind_input(kv.past, np.empty((len(inputs), kv.heads, 0, kv.width), kv.dtype))
        assert self._output is not None
        states = self._session.fetch(binding, self._output).astype(np.float32)
        if states.ndim == 2:
            return states
        found: Matrix = pooling.pool(states, lengths, self._mode)
        return found
