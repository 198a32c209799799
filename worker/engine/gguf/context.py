"""Makes the llama.cpp context that settings ask for, and says how its sequences are shared out."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import os

from llama_cpp import llama_cpp as llama

from tokenbus.worker.engine.gguf import backend, settings_resolution
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

_CELLS = 256
"""llama.cpp rounds its memory up to whole multiples of this, but not what it takes in one batch."""
_MAX_DEFAULT_CONTEXT = 8_192
_MAX_DEFAULT_KV_TOKENS = 16_384
_IDLE_LANES = 48
"""Ends of cached prefixes that can be on the device at the same time. Each costs a row of logits in host memory."""


def context_length(settings: EngineSettings, trained: int) -> int:
    """Tokens of one sequence."""
    return settings.context_length or int(min(trained, _MAX_DEFAULT_CONTEXT))


def default_kv_tokens(length: int) -> int:
    """Tokens of KV memory for all sequences of that length together, where no setting says how many."""
    return max(length, min(4 * length, _MAX_DEFAULT_KV_TOKENS))


def no_sharing_reason(model: llama.llama_model_p, settings: EngineSettings) -> str | None:
    """Why the sequences of such a context could not share anything; None if they may be able to."""
    if settings.kv_layout == "per-stream":
        return "--kv-layout per-stream keeps sequences apart"
    if llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model):
        return "a recurrent model's state can't be cut at a token"
    if llama.llama_model_n_swa(model) > 0:
        return "a model with a sliding window forgets what a prefix needs"
    return None


def first_seq_id(model: llama.llama_model_p, settings: EngineSettings) -> int:
    """The sequence id of lane 0: where lanes are shared, the id before it is for copies alone."""
    return 0 if no_sharing_reason(model, settings) else 1


def num_lanes(model: llama.llama_model_p, settings: EngineSettings) -> int:
    """Lanes of running sequences, and of idle ones where these can be of use."""
    if no_sharing_reason(model, settings):
        return settings.max_num_seqs
    return min(settings.max_num_seqs + _IDLE_LANES, int(llama.llama_max_parallel_sequences()) - 1)


def create(model: llama.llama_model_p, settings: EngineSettings) -> llama.llama_context_p:
    """Raises ModelError when there is no room for it."""
    length = context_length(settings, llama.llama_model_n_ctx_train(model))
    threads = settings.threads or len(os.sched_getaffinity(0))
    params = llama.llama_context_default_params()
    params.n_ctx = -(-(settings.kv_tokens or default_kv_tokens(length)) // _CELLS) * _CELLS
    params.n_batch = settings.max_num_batched_tokens
    params.n_ubatch = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
    params.n_seq_max = num_lanes(model, settings) + first_seq_id(model, settings)
    params.n_outputs_max = params.n_seq_max
    params.n_threads = threads
    params.n_threads_batch = threads
    params.kv_unified = settings.kv_layout != "per-stream"
    params.flash_attn_type = settings_resolution.FLASH_ATTENTION[settings.flash_attention]
    params.type_k = settings_resolution.CACHE_TYPES[settings.cache_type_k]
    params.type_v = settings_resolution.CACHE_TYPES[settings.cache_type_v]
    params.no_perf = True
    context: llama.llama_context_p | None = llama.llama_init_from_model(model, params)
    if context is None:
        reason = backend.last_error()
        advice = "a smaller --kv-tokens or --context-length"
        if "block size" in reason:
            advice = "f16 or another type that is not quantized as --cache-type-k and --cache-type-v"
        raise ModelError(f"no context of {params.n_ctx} tokens could be made: {reason}; pass {advice}")
    return context
