"""Computes embeddings with an ONNX graph: from hidden states, which it pools, or from vectors that the graph has
pooled."""

from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.protocol.wire import limits, messages
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.pooling import PoolingRunner
from tokenbus.worker.engine.device.runner import BatchLimits, WholePass
from tokenbus.worker.engine.onnx.graph import Array
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.model_facts import DEFAULT_INPUT
from tokenbus.worker.engine.onnx.settings_resolution import CacheSize
from tokenbus.worker.files.model_config import pooling_mode

_CLOSE = 1e-2
"""The largest difference, as a share of a vector's length, between a vector computed alone and in a batch."""


class OnnxEmbedder:
    """Raises ModelError if the graph can't compute a first embedding."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, *, max_input_tokens: int) -> None:
        graph = model.graph
        self.max_input_tokens = max_input_tokens
        self.vocab_size = model.tokenizer.size
        self.batch_limits = BatchLimits(settings.max_num_batched_tokens, limits.MAX_EMBED_INPUTS, is_padded=True)
        self._graph = graph
        self._graph_runner = model.graph_runner
        self._tokenizer = model.tokenizer
        self._mode = pooling_mode(settings.pooling, model.files.sidecars, generates=graph.logits is not None)
        self._output = graph.pooled if graph.pooled is not None and graph.hidden is None else graph.hidden
        self._can_batch = False  # until the trial has shown that rows do not affect each other
        self.width = self._try(str(model.files.weights))

    def __repr__(self) -> str:
        return f"<OnnxEmbedder of {self.width}, {self._mode}>"

    def describe(self) -> messages.CardEmbeddings:
        mode = "graph" if self._output is self._graph.pooled else self._mode
        return messages.CardEmbeddings(dimensions=self.width, pooling=mode, max_input_tokens=self.max_input_tokens)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode_with_special_tokens(text)

    def begin(self, inputs: Listing[Listing[int]]) -> WholePass:
        return WholePass(self.pool, inputs)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        """Returns a row for each input, (inputs, width)."""
        if self._can_batch:
            return self._run(inputs)
        return np.concatenate([self._run([one]) for one in inputs])

    def _try(self, where: str) -> int:
        """Returns the width of the vectors, and finds out whether the rows of a batch affect each other."""
        inputs = [[place % self.vocab_size for place in range(1, count)] for count in (7, 4)]
        try:
            alone = np.concatenate([self._run([one]) for one in inputs])
            together = self._run(inputs)
        except Exception as error:  # onnxruntime raises many classes, and an unknown graph may fail in any way
            raise ModelError(f"{where}: can't compute a first embedding: {error}") from error
        difference = np.linalg.norm(alone - together, axis=1)
        self._can_batch = bool((difference <= _CLOSE * np.linalg.norm(alone, axis=1)).all())
        return int(alone.shape[1])

    def _run(self, inputs: Listing[Listing[int]]) -> Matrix:
        """Computes inputs as one batch, padded at their ends."""
        lengths = np.array([len(one) for one in inputs])
        ids = np.zeros((len(inputs), lengths.max()), np.int64)
        for row, one in zip(ids, inputs, strict=True):
            row[: len(one)] = one
        columns = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        binding = self._graph_runner.bind()
        self._graph_runner.bind_inputs(binding, ids, columns < lengths[:, None], columns, has_past=False)
        for kv in self._graph.kv:  # a generating model starts from an empty cache
            binding.bind_input(kv.past, np.empty((len(inputs), kv.heads, 0, kv.width), kv.dtype))
        assert self._output is not None
        states = binding.fetch(self._output).astype(np.float32)
        found: Matrix = states if states.ndim == 2 else pool_states(states, lengths, self._mode)
        return found


def make_runner(model: OnnxModel, settings: EngineSettings, release: Callable[[], None]) -> PoolingRunner:
    """Returns a replica of an encoder, which generates nothing. `release` is called once the model isn't needed.

    Raises ModelError if it can't be served."""
    if settings.pooling == "none":
        raise ModelError(f"{model.files.weights}: can only embed; leave --pooling none out")
    trained = model.model_config.context_length or DEFAULT_INPUT
    longest = min(settings.context_length or trained, trained)
    embedder = OnnxEmbedder(model, settings, max_input_tokens=longest)
    size = CacheSize(block_size=longest, context_length=longest, max_num_seqs=1, num_rows=1, kv_tokens=longest)
    return PoolingRunner(
        model.describe(settings, size, (), embedder), model.tokenizer, model.device_memory, release, embedder=embedder
    )


def pool_states(states: Array, lengths: Array, mode: str) -> Array:
    """Pools hidden states of (rows, tokens, width) into vectors of (rows, width). Rows begin at column 0."""
    if mode == "cls":
        found: Array = states[:, 0]
    elif mode == "last":
        found = states[np.arange(len(states)), lengths - 1]
    else:
        is_token = np.arange(states.shape[1]) < lengths[:, None]
        found = (states * is_token[:, :, None]).sum(axis=1, dtype=np.float64) / lengths[:, None]
    return found.astype(np.float32)
