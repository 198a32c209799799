"""A llama.cpp context that computes hidden states, with the batch that goes into it."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.gguf import backend, context
from tokenbus.worker.engine.gguf.batch import BatchPart, LlamaBatch

_NO_ROOM, _OUT_OF_MEMORY = 1, -2
"""llama_decode's results for too few cells, and for an allocation that failed."""


class PoolingSize(NamedTuple):
    """The size of a context for pooling."""

    tokens: int
    """The tokens of all inputs of a batch."""
    inputs: int
    outputs: int
    """The most tokens with outputs in one decode; each costs a row of logits if the model has them."""
    ubatch_tokens: int


class PoolingContext:
    """Raises ModelError if there is not enough memory for it; `remedy` names the settings that lower its need."""

    def __init__(
        self, model: llama.llama_model_p, settings: EngineSettings, pooling: int, size: PoolingSize, remedy: str
    ) -> None:
        params = context.common_params(settings)
        params.embeddings = True
        params.pooling_type = pooling
        # llama.cpp aborts if its largest ubatch does not have the same number of tokens for each sequence.
        params.n_ctx = params.n_batch = -(-size.tokens // context.CELLS) * context.CELLS
        params.n_ubatch = params.n_batch if size.ubatch_tokens >= size.tokens else size.ubatch_tokens
        params.n_outputs_max = params.n_batch if size.outputs >= size.tokens else size.outputs
        params.n_seq_max = size.inputs
        # With separate memory per sequence, llama.cpp would split a batch into ubatches of equal lengths.
        params.kv_unified = True
        made: llama.llama_context_p | None = llama.llama_init_from_model(model, params)
        if made is None:
            raise ModelError(
                f"no context for inputs of {size.tokens} tokens could be made: {backend.last_error()}; pass a smaller "
                f"{remedy} or --ubatch-tokens"
            )
        self._context: llama.llama_context_p = made
        self._memory = llama.llama_get_memory(made)
        self._batch = LlamaBatch(params.n_batch, 0)
        self.is_causal = self._memory is not None and bool(llama.llama_get_causal_attn(made))

    def __repr__(self) -> str:
        return f"<PoolingContext, causal {self.is_causal}>"

    def clear(self, *, overwrites: bool) -> None:
        """Empties the context for a new batch. `overwrites` says whether the cells' contents are overwritten too:
        attention multiplies them by 0, and 0 x NaN is NaN."""
        if self._memory is not None:
            llama.llama_memory_clear(self._memory, overwrites)

    def decode(self, parts: Iterable[BatchPart], *, has_outputs: bool) -> None:
        """Computes parts of inputs; either all of their tokens have outputs or none. Raises InsufficientMemoryError and
        DeviceError."""
        self._batch.fill(parts, "all" if has_outputs else "none")
        if not self._batch.struct.n_tokens:
            return
        llama.llama_set_embeddings(self._context, has_outputs)
        status = llama.llama_decode(self._context, self._batch.struct)
        if status in (_NO_ROOM, _OUT_OF_MEMORY):  # nothing of the batch is kept, so the next one can be tried
            raise InsufficientMemoryError(backend.last_error())
        if status != 0:
            raise DeviceError(f"llama_decode returned {status}: {backend.last_error()}")

    def states(self, count: int, width: int) -> Matrix:
        """Returns the hidden state of each token of the last decode, if llama.cpp pools nothing; valid until the next
        decode."""
        pointer = llama.llama_get_embeddings(self._context)
        if not pointer:
            raise DeviceError("llama.cpp has no hidden states of tokens that it has computed")
        return np.ctypeslib.as_array(pointer, (count, width))

    def row(self, number: int, width: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Returns a copy of an input's pooled row."""
        pointer = llama.llama_get_embeddings_seq(self._context, number)
        if not pointer:
            raise DeviceError("llama.cpp has no embedding of an input that it has computed")
        return np.ctypeslib.as_array(pointer, (width,)).copy()

    def close(self) -> None:
        llama.llama_free(self._context)
