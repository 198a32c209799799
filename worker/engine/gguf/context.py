"""Creates the llama.cpp context that the settings ask for, and defines how its sequences are used.

Every lane is one of llama.cpp's sequences. If lanes can share tokens, there are more lanes than running sequences, for
the ends of cached prefixes. The sequence id before the first lane is reserved for copies (lanes.py)."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import os

from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import backend, settings_resolution
from tokenbus.worker.engine.gguf.lanes import FIRST_SEQ_ID
from tokenbus.worker.engine.gguf.model_facts import IDLE_LANES

CELLS = 256
"""llama.cpp rounds its KV memory up to multiples of this, but not the tokens that it takes in one batch."""


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
        backend.last_error()  # creating the real one reports its own errors
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


def create(model: llama.llama_model_p, settings: EngineSettings, *, partial_state: bool) -> llama.llama_context_p:
    """`partial_state` is the model's `has_partial_state`. Raises ModelError if there is too little memory."""
    params = common_params(settings)
    params.n_ctx = -(-_kv_tokens(model, settings) // CELLS) * CELLS
    params.n_batch = settings.max_num_batched_tokens
    params.n_ubatch = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
    params.n_seq_max = num_lanes(settings, partial_state=partial_state) + FIRST_SEQ_ID
    # At most one token of each sequence has logits in a step.
    params.n_outputs_max = params.n_seq_max
    params.kv_unified = True  # decision 0020
    params.swa_full = False  # no lane goes back to an earlier window
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


def common_params(settings: EngineSettings) -> llama.llama_context_params:
    """Returns the parameters common to all contexts."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    params: llama.llama_context_params = llama.llama_context_default_params()
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn_type = settings_resolution.FLASH_ATTENTION[settings.flash_attention]
    params.type_k = settings_resolution.CACHE_TYPES[settings.cache_type_k]
    params.type_v = settings_resolution.CACHE_TYPES[settings.cache_type_v]
    params.no_perf = True
    return params
