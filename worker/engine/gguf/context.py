"""Creates llama.cpp's contexts for streams and for pooling, defines how their sequences are used, and fills batches.

Every lane is one of llama.cpp's sequences. If lanes can share tokens, there are more lanes than running sequences, for
the ends of cached prefixes. The sequence id before the first lane is reserved for copies (lanes.py)."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import time
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import Literal, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.protocol.process.cores import usable_cores
from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.gguf import backend, settings_resolution, waiting
from tokenbus.worker.engine.gguf.lanes import FIRST_SEQ_ID
from tokenbus.worker.engine.gguf.model_facts import IDLE_LANES, OTHER_ROWS

Outputs = Literal["none", "last", "all"]
"""Which tokens of each part have outputs: a row of logits, or a hidden state."""
CELLS = 256
"""llama.cpp rounds its KV memory up to multiples of this, but not the tokens that it takes in one batch."""
_NO_ROOM, _OUT_OF_MEMORY = 1, -2
"""llama_decode's results for too few cells, and for an allocation that failed."""


class BatchPart(NamedTuple):
    """Consecutive tokens of one sequence."""

    number: int
    """The sequence, counted from the first one of the batch's context."""
    start: int
    """The position of the first token."""
    token_ids: Listing[int]
    num_last: int = 1
    """The number of its last tokens that have outputs where not all do."""


class LlamaBatch:
    """A `llama_batch` over numpy arrays that it owns, for at most `capacity` tokens.

    `llama_batch_init` is not used: it allocates each token's sequence ids separately, so they would have to be filled
    one by one. Here `seq_id[i]` points into one array (8 us instead of 4.9 ms for 2,048 tokens)."""

    def __init__(self, capacity: int, first_seq_id: int) -> None:
        self._first_seq_id = first_seq_id
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._seq_ids = np.zeros(capacity, np.int32)
        # Every token belongs to exactly one sequence.
        self._num_seq_ids = np.ones(capacity, np.int32)
        self._wants_outputs = np.zeros(capacity, np.int8)
        # llama.cpp expects a pointer to each token's sequence ids: for token i, element i of one array.
        addresses = self._seq_ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._seq_ids.itemsize
        self._seq_id_pointers = addresses.astype(np.uintp)
        self.struct = llama.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, llama.llama_token),
            embd=None,
            pos=_pointer(self._positions, llama.llama_pos),
            n_seq_id=_pointer(self._num_seq_ids, ctypes.c_int32),
            seq_id=_pointer(self._seq_id_pointers, ctypes.POINTER(llama.llama_seq_id)),
            logits=_pointer(self._wants_outputs, ctypes.c_int8),
        )

    def __repr__(self) -> str:
        return f"<LlamaBatch of {self.struct.n_tokens}>"

    def fill(self, parts: Iterable[BatchPart], outputs: Outputs) -> None:
        """Lays out the tokens of all parts one after another."""
        at = 0
        for number, start, token_ids, num_last in parts:
            end = at + len(token_ids)
            self._tokens[at:end] = token_ids
            self._positions[at:end] = range(start, start + len(token_ids))
            self._seq_ids[at:end] = self._first_seq_id + number
            self._wants_outputs[at:end] = outputs == "all"
            self._wants_outputs[end - num_last : end] = outputs != "none"
            at = end
        self.struct.n_tokens = at


def _pointer(array: np.ndarray, ctype: type) -> ctypes._Pointer:  # type: ignore[type-arg]
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))


class ContextTooLargeError(ModelTooLargeError):
    """There was no memory for a context, or llama.cpp couldn't create one for another reason."""


def _kv_tokens(model: llama.llama_model_p, settings: EngineSettings) -> int:
    """Returns the tokens that all sequences may have together. If tokens take no memory, each may have its context."""
    length = settings.context_length or int(llama.llama_model_n_ctx_train(model))
    if llama.llama_model_is_recurrent(model):
        return settings.max_num_seqs * length
    return settings.kv_tokens or length


def has_partial_state(model: llama.llama_model_p) -> bool:
    """Returns whether sequences have a state that can't be cut at a token: recurrent layers or a sliding window."""
    if llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model):
        return True
    return llama.llama_model_n_swa(model) > 0 and _keeps_windows(model)


def _keeps_windows(model: llama.llama_model_p) -> bool:
    """Returns whether a model that names a window attends to one; in some, all layers attend to all tokens anyway.

    Only a context's memory shows that: the saved state of an empty sequence has a part for windows."""
    params: llama.llama_context_params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CELLS
    context: llama.llama_context_p | None = llama.llama_init_from_model(model, params)
    if context is None:
        return True
    whole, partial = (
        llama.llama_state_seq_get_size_ext(context, 0, flags) for flags in (0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
    )
    llama.llama_free(context)
    return bool(whole != partial)


def num_lanes(settings: EngineSettings, *, partial_state: bool) -> int:
    """Returns the number of lanes for running sequences, and for cached prefixes if lanes can share tokens.

    A lane with a partial state costs its own recurrent state or window, even if it is idle."""
    if partial_state:
        return settings.max_num_seqs
    return min(settings.max_num_seqs + IDLE_LANES, int(llama.llama_max_parallel_sequences()) - FIRST_SEQ_ID)


def max_rows(settings: EngineSettings) -> int:
    """Returns the most tokens of one pass that may have logits."""
    return settings.max_num_seqs + OTHER_ROWS


def create(model: llama.llama_model_p, settings: EngineSettings, *, partial_state: bool) -> llama.llama_context_p:
    """`partial_state` is the model's `has_partial_state`. Raises ModelError if there is too little memory."""
    params = common_params(settings)
    params.n_ctx = -(-_kv_tokens(model, settings) // CELLS) * CELLS
    params.n_batch = settings.max_num_batched_tokens
    params.n_ubatch = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
    params.n_seq_max = num_lanes(settings, partial_state=partial_state) + FIRST_SEQ_ID
    params.n_outputs_max = max_rows(settings)
    params.kv_unified = True  # decision 0020
    params.swa_full = False  # no lane goes back to an earlier window
    backend.forget_errors()
    context: llama.llama_context_p | None = llama.llama_init_from_model(model, params)
    if context is None:
        reason = backend.last_error()
        problem = f"no context of {params.n_ctx} tokens could be made: {reason}; pass"
        if "block size" in reason:  # the width of a head is not a multiple of the type's block
            raise ModelError(
                f"{problem} f16 or another type that is not quantized as --cache-type-k and --cache-type-v"
            )
        raise ContextTooLargeError(f"{problem} a smaller --kv-tokens or --context-length")
    if llama.llama_get_memory(context) is None:
        llama.llama_free(context)
        raise ModelError("the model generates nothing: llama.cpp keeps no keys, values or states of its tokens")
    return context


def decode(handle: llama.llama_context_p, batch: llama.llama_batch) -> int:
    """Computes a batch; returns llama.cpp's status."""
    began = time.perf_counter()
    status: int = llama.llama_decode(handle, batch)
    if llama.llama_n_threads(handle) > 1:
        waiting.computed(time.perf_counter() - began)
    return status


def common_params(settings: EngineSettings) -> llama.llama_context_params:
    """Returns the parameters common to all contexts."""
    threads = settings.threads or usable_cores()
    params: llama.llama_context_params = llama.llama_context_default_params()
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn_type = settings_resolution.FLASH_ATTENTION[settings.flash_attention]
    params.type_k = settings_resolution.CACHE_TYPES[settings.cache_type_k]
    params.type_v = settings_resolution.CACHE_TYPES[settings.cache_type_v]
    params.no_perf = True
    return params


class PoolingSize(NamedTuple):
    """The size of a context for pooling."""

    tokens: int
    """The tokens of all inputs of a batch."""
    inputs: int
    outputs: int
    """The most tokens with outputs in one decode; each costs a row of logits if the model has them."""
    ubatch_tokens: int


class PoolingContext:
    """A context that computes hidden states, with the batch that goes into it.

    Raises ModelError if there is not enough memory for it; `remedy` names the settings that lower its need."""

    def __init__(
        self, model: llama.llama_model_p, settings: EngineSettings, pooling: int, size: PoolingSize, remedy: str
    ) -> None:
        params = common_params(settings)
        params.embeddings = True
        params.pooling_type = pooling
        # llama.cpp aborts if its largest ubatch does not have the same number of tokens for each sequence.
        params.n_ctx = params.n_batch = -(-size.tokens // CELLS) * CELLS
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
        status = decode(self._context, self._batch.struct)
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
