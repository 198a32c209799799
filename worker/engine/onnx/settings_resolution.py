"""Which settings an ONNX engine can meet, and what it chooses where they leave it open; pure."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tokenbus.worker.engine.models.generation_config import GenerationConfig
from tokenbus.worker.engine.onnx import pooling
from tokenbus.worker.engine.onnx.graphs.session import PROVIDERS
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

AUTO = -1
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_NUM_SEQS = 16
_MAX_DEFAULT_CONTEXT = 4_096
_MAX_ROWS = 256
_DEFAULT_MAX_PADDINGS = 4_096
_DEFAULT_MEMORY_SHARE = 4
"""Of the memory that is free, one byte in so many goes to the cache unless a setting says otherwise."""
_GGUF_ONLY = (
    "kv_layout",
    "cache_type_k",
    "cache_type_v",
    "flash_attention",
    "gpu_layers",
    "main_gpu",
    "split_mode",
    "tensor_split",
    "ubatch_tokens",
    "host_cache_mib",
)
"""Settings that mean nothing here: whoever gives one is told, instead of believing that it holds."""


class CacheSize(NamedTuple):
    """How large the cache is: rows for running sequences and for idle prefixes, each of one context."""

    block_size: int
    context_length: int
    """Tokens of one sequence, and of one row: whole blocks."""
    max_num_seqs: int
    num_rows: int

    @property
    def row_blocks(self) -> int:
        return self.context_length // self.block_size

    @property
    def total_blocks(self) -> int:
        return self.num_rows * self.row_blocks


class CacheLimits(NamedTuple):
    """What a model and its device allow."""

    trained: int | None
    """Tokens that the model was made for."""
    bytes_per_token: int
    """Of the cache."""
    free_bytes: int | None
    """What the device has; None where nobody says."""


def validate(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met, and what it may be."""
    default = EngineSettings(model="")
    for name in _GGUF_ONLY:
        if getattr(settings, name) != getattr(default, name):
            raise ModelError(f"--{name.replace('_', '-')} is for --engine gguf; take it away")
    for flag, value, holds, allowed in _rules(settings):
        if not holds:
            raise ModelError(f"{flag} must be {allowed}, got {value}")


def _rules(settings: EngineSettings) -> Iterator[tuple[str, object, bool, str]]:
    onnx = settings.onnx
    num_seqs, block_size = settings.max_num_seqs, settings.kv_block_size
    batched, least = settings.max_num_batched_tokens, max(num_seqs, 1)
    yield "--provider", onnx.provider, onnx.provider in PROVIDERS, f"one of {', '.join(PROVIDERS)}"
    yield "--pooling", onnx.pooling, onnx.pooling in pooling.MODES, f"one of {', '.join(pooling.MODES)}"
    yield "--device-id", onnx.device_id, onnx.device_id >= 0, "0 or more"
    yield "--device-memory-mib", onnx.device_memory_mib, onnx.device_memory_mib >= 0, "0 or more"
    yield "--min-free-mib", onnx.min_free_mib, onnx.min_free_mib >= 0, "0 or more"
    yield "--max-paddings", onnx.max_paddings, onnx.max_paddings >= AUTO, "0 or more"
    yield "--max-num-seqs", num_seqs, num_seqs == AUTO or 1 <= num_seqs <= _MAX_ROWS, f"1 to {_MAX_ROWS}"
    yield "--kv-block-size", block_size, block_size == AUTO or block_size >= 1, "at least 1"
    yield (
        "--context-length",
        settings.context_length,
        settings.context_length >= 0,
        "at least 1, or 0 to have it chosen",
    )
    yield "--kv-tokens", settings.kv_tokens, settings.kv_tokens >= 0, "at least one context, or 0 to have it chosen"
    yield "--max-num-batched-tokens", batched, batched > least, f"above --max-num-seqs ({least})"
    yield "--threads", settings.threads, settings.threads >= 0, "0 or more"
    overcommit, priority_s = settings.scheduler.overcommit, settings.scheduler.priority_s
    yield "--kv-overcommit", overcommit, 1 <= overcommit <= 100, "1 to 100"
    yield "--priority-s", priority_s, 0 <= priority_s <= 3_600, "0 to 3,600"
    idle = settings.scheduler.max_cached_blocks
    yield "--max-cached-blocks", idle, idle is None or idle >= 0, "0 or more"


def max_paddings(settings: EngineSettings, generation_config: GenerationConfig) -> int:
    if settings.onnx.max_paddings != AUTO:
        return settings.onnx.max_paddings
    return _DEFAULT_MAX_PADDINGS if generation_config.max_paddings is None else generation_config.max_paddings


def size_cache(settings: EngineSettings, generation_config: GenerationConfig, limits: CacheLimits) -> CacheSize:
    """How many rows there are room for. Every row can hold a whole context, so that what runs never has to give way.

    Raises ModelError where not even one fits, or fewer than were asked for, and for advice that can't be met."""
    chosen = _chosen(settings, generation_config)
    validate(chosen)
    context = chosen.context_length or _default_context(chosen, limits)
    if limits.trained is not None and context > limits.trained:
        raise ModelError(f"--context-length {context} is above what the model was made for, {limits.trained}")
    block_size = chosen.kv_block_size
    if block_size > context:
        raise ModelError(f"--kv-block-size {block_size} is above the context, {context}")
    context = context // block_size * block_size
    most = _max_rows(chosen, limits, context)
    if settings.max_num_seqs > most:
        raise ModelError(
            f"--max-num-seqs {settings.max_num_seqs} needs room for as many contexts of {context} tokens, there is "
            f"room for {most}: pass a smaller --context-length, fewer, or more --kv-tokens"
        )
    num_seqs = min(chosen.max_num_seqs, most)
    return CacheSize(block_size, context, num_seqs, min(most, num_seqs + _idle_rows(num_seqs)))


def _default_context(settings: EngineSettings, limits: CacheLimits) -> int:
    """A context that the model was made for and that there is room for, where nobody asked for one."""
    allowed = [_MAX_DEFAULT_CONTEXT, limits.trained or _MAX_DEFAULT_CONTEXT]
    if settings.kv_tokens:
        allowed.append(max(settings.kv_tokens, settings.kv_block_size))
    if settings.kv_limit_bytes:
        allowed.append(max(settings.kv_limit_bytes // limits.bytes_per_token, settings.kv_block_size))
    return min(allowed)


def _chosen(settings: EngineSettings, generation_config: GenerationConfig) -> EngineSettings:
    """Fills in what settings leave open and does not hang on room, by the model's own hints where it has some."""
    block_size, num_seqs = settings.kv_block_size, settings.max_num_seqs
    if block_size == AUTO:
        block_size = generation_config.kv_block_size or _DEFAULT_BLOCK_SIZE
    if num_seqs == AUTO:
        num_seqs = min(generation_config.max_num_seqs or _DEFAULT_NUM_SEQS, _MAX_ROWS)
    return msgspec.structs.replace(
        settings,
        context_length=settings.context_length or generation_config.context_length or 0,
        max_num_seqs=num_seqs,
        kv_block_size=block_size,
        kv_tokens=settings.kv_tokens or (generation_config.total_kv_blocks or 0) * block_size,
    )


def _max_rows(settings: EngineSettings, limits: CacheLimits, context: int) -> int:
    """Raises ModelError where there is no room for one."""
    row_bytes = context * limits.bytes_per_token
    allowed = [(_MAX_ROWS, "")]
    if settings.kv_tokens:
        allowed.append((settings.kv_tokens // context, f"--kv-tokens {settings.kv_tokens} are"))
    if settings.kv_limit_bytes:
        allowed.append(
            (settings.kv_limit_bytes // row_bytes, f"the {settings.kv_limit_bytes} bytes of --kv-budget are")
        )
    elif not settings.kv_tokens and limits.free_bytes is not None:
        fits = limits.free_bytes // row_bytes
        allowed.append((max(fits // _DEFAULT_MEMORY_SHARE, min(fits, 1)), f"the {limits.free_bytes} bytes free are"))
    most, what = min(allowed)
    if not most:
        raise ModelError(
            f"{what} too few for one context of {context} tokens, which takes {row_bytes} bytes: pass a smaller "
            "--context-length"
        )
    return most


def _idle_rows(num_seqs: int) -> int:
    """Rows for prefixes that nobody uses."""
    return max(4, num_seqs // 2)
