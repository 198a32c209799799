"""Which settings a llama.cpp engine can meet, and what it chooses where they leave it open; imports no model."""

from collections.abc import Iterator
from typing import NamedTuple

import llama_cpp
import msgspec
from llama_cpp import llama_cpp as llama

from tokenbus.worker.engine.models.generation_config import GenerationConfig
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

AUTO = -1
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_NUM_SEQS = 16
CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # of ggml.h; the binding has no name for it
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_WITHOUT_FLASH_ATTENTION = ("f32", "f16", "bf16")
FLASH_ATTENTION = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
KV_LAYOUTS = ("auto", "unified", "per-stream")
SPLIT_MODES = {
    "none": llama.LLAMA_SPLIT_MODE_NONE,
    "layer": llama.LLAMA_SPLIT_MODE_LAYER,
    "row": llama.LLAMA_SPLIT_MODE_ROW,
}


class _Rule(NamedTuple):
    flag: str
    value: object
    holds: bool
    allowed: str


def resolve(settings: EngineSettings, generation_config: GenerationConfig) -> EngineSettings:
    """Fills in what settings leave open, by the model's own hints where it has some."""
    block_size, num_seqs = settings.kv_block_size, settings.max_num_seqs
    if block_size == AUTO:
        block_size = generation_config.kv_block_size or _DEFAULT_BLOCK_SIZE
    if num_seqs == AUTO:
        num_seqs = generation_config.max_num_seqs or _DEFAULT_NUM_SEQS
    return msgspec.structs.replace(
        settings,
        context_length=settings.context_length or generation_config.context_length or 0,
        max_num_seqs=num_seqs,
        kv_block_size=block_size,
        kv_tokens=settings.kv_tokens or (generation_config.total_kv_blocks or 0) * block_size,
    )


def validate(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met, and what it may be."""
    for limit in (*_sizes(settings), *_enumerations(settings)):
        if not limit.holds:
            raise ModelError(f"{limit.flag} must be {limit.allowed}, got {limit.value}")
    if settings.flash_attention == "off" and settings.cache_type_v not in _WITHOUT_FLASH_ATTENTION:
        raise ModelError(
            f"--cache-type-v {settings.cache_type_v} needs flash attention: leave --flash-attention at auto or on"
        )


def _sizes(settings: EngineSettings) -> Iterator[_Rule]:
    most = llama.llama_max_parallel_sequences() - 1
    num_seqs, block_size = settings.max_num_seqs, settings.kv_block_size
    batched, kv, context = settings.max_num_batched_tokens, settings.kv_tokens, settings.context_length
    least_kv = max(context, block_size, 1)
    yield _Rule("--max-num-seqs", num_seqs, num_seqs == AUTO or 1 <= num_seqs <= most, f"1 to {most}")
    yield _Rule("--kv-block-size", block_size, block_size == AUTO or block_size >= 1, "at least 1")
    yield _Rule("--context-length", context, context == 0 or context >= 2, "at least 2, or 0 to have it chosen")
    yield _Rule("--kv-tokens", kv, kv == 0 or kv >= least_kv, f"one block and one context at least ({least_kv})")
    yield _Rule("--max-num-batched-tokens", batched, batched > num_seqs, f"above --max-num-seqs ({num_seqs})")
    yield _Rule("--ubatch-tokens", settings.ubatch_tokens, settings.ubatch_tokens >= 1, "at least 1")
    yield _Rule("--host-cache-mib", settings.host_cache_mib, settings.host_cache_mib >= AUTO, "0 or more")
    yield _Rule("--threads", settings.threads, settings.threads >= 0, "0 or more")
    overcommit, priority_s = settings.scheduler.overcommit, settings.scheduler.priority_s
    yield _Rule("--kv-overcommit", overcommit, 1 <= overcommit <= 100, "1 to 100")
    yield _Rule("--priority-s", priority_s, 0 <= priority_s <= 3_600, "0 to 3,600")
    idle = settings.scheduler.max_cached_blocks
    yield _Rule("--max-cached-blocks", idle, idle is None or idle >= 0, "0 or more")


def _enumerations(settings: EngineSettings) -> Iterator[_Rule]:
    for flag, value, known in (
        ("--kv-layout", settings.kv_layout, KV_LAYOUTS),
        ("--cache-type-k", settings.cache_type_k, CACHE_TYPES),
        ("--cache-type-v", settings.cache_type_v, CACHE_TYPES),
        ("--flash-attention", settings.flash_attention, FLASH_ATTENTION),
        ("--split-mode", settings.split_mode, SPLIT_MODES),
    ):
        yield _Rule(flag, value, value in known, f"one of {', '.join(known)}")
