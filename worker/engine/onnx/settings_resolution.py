"""Decides which settings an ONNX engine can meet, and how large its cache is."""

from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import CHOICES, EngineSettings
from tokenbus.worker.engine.models.settings_resolution import AUTO, SettingRule, common_rules, require, resolve
from tokenbus.worker.engine.onnx.graphs.device import EXECUTION_PROVIDERS, named
from tokenbus.worker.files.generation_config import GenerationConfig

_SHORT_CONTEXT = 4_096
"""The default context where memory is short, if the model was made for that much."""
_MAX_CONTEXT = 262_144
_MAX_ROWS = 256
_DEFAULT_MAX_PADDINGS = 4_096
_DEFAULT_MEMORY_SHARE = 4
"""By default, one in this many bytes of free memory is used for the cache."""
_PROVIDERS = ("auto", *EXECUTION_PROVIDERS)
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
    "max_embed_tokens",
)
"""Settings that have no meaning here. They are refused rather than silently ignored."""


class CacheSize(NamedTuple):
    """The size of the cache: rows for running sequences and for idle prefixes, each as long as a context."""

    block_size: int
    context_length: int
    """The tokens of one sequence, and of one row: a multiple of the block size."""
    max_num_seqs: int
    num_rows: int

    @property
    def total_blocks(self) -> int:
        return self.num_rows * (self.context_length // self.block_size)


class CacheLimits(NamedTuple):
    """The limits set by a model and its device."""

    trained: int | None
    """The tokens that the model was trained for; None if its files don't say."""
    bytes_per_token: int
    free_bytes: int | None
    """The free memory of the device; None if the system doesn't say."""
    pool_bytes: int = 0
    """The memory that the cache may borrow in full; 0 if it has its own limit."""


def validate(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met, and its allowed values."""
    default = EngineSettings(model="")
    for name in _GGUF_ONLY:
        if getattr(settings, name) != getattr(default, name):
            raise ModelError(f"--{name.replace('_', '-')} is for --engine gguf; remove it")
    require(common_rules(settings, max_num_seqs=_MAX_ROWS))
    require(_rules(settings))
    if len(settings.devices) > 1:
        raise ModelError(
            f"--devices {','.join(settings.devices)}: onnxruntime runs a graph on one device; for one replica on each "
            f"pass --replicas {len(settings.devices)} {' '.join(f'--devices {name}' for name in settings.devices)}"
        )
    if settings.devices and (settings.onnx.provider, settings.onnx.device_id) != (_PROVIDERS[0], 0):
        raise ModelError("--devices says what --provider and --device-id say; pass only one of these")


def _rules(settings: EngineSettings) -> Iterator[SettingRule]:
    onnx, context, kv = settings.onnx, settings.context_length, settings.kv_tokens
    yield SettingRule("--provider", onnx.provider, onnx.provider in _PROVIDERS, f"one of {', '.join(_PROVIDERS)}")
    devices = settings.devices
    yield SettingRule("--devices", ",".join(devices), all(map(named, devices)), "one of cpu, cuda:0, cuda:1, ...")
    pooling, modes = settings.pooling, CHOICES["pooling"]
    yield SettingRule("--pooling", pooling, pooling in modes, f"one of {', '.join(modes)}")
    yield SettingRule("--device-id", onnx.device_id, onnx.device_id >= 0, "0 or more")
    yield SettingRule("--device-memory-mib", onnx.device_memory_mib, onnx.device_memory_mib >= 0, "0 or more")
    yield SettingRule("--min-free-mib", onnx.min_free_mib, onnx.min_free_mib >= 0, "0 or more")
    yield SettingRule("--max-paddings", onnx.max_paddings, onnx.max_paddings >= AUTO, "0 or more")
    yield SettingRule("--context-length", context, context >= 0, "at least 1, or 0 to have it chosen")
    yield SettingRule("--kv-tokens", kv, kv >= 0, "at least one context, or 0 to have it chosen")


def max_paddings(settings: EngineSettings, generation_config: GenerationConfig) -> int:
    if settings.onnx.max_paddings != AUTO:
        return settings.onnx.max_paddings
    return _DEFAULT_MAX_PADDINGS if generation_config.max_paddings is None else generation_config.max_paddings


def size_cache(settings: EngineSettings, generation_config: GenerationConfig, limits: CacheLimits) -> CacheSize:
    """Returns the size of a cache that fits. Every row can hold a whole context, so nothing is ever preempted.

    Raises ModelError if not even one context fits, or fewer than requested, or if a recommendation of the model can't
    be met."""
    resolved = resolve(settings, generation_config, max_num_seqs=_MAX_ROWS)
    validate(resolved)
    block_size, context = resolved.kv_block_size, resolved.context_length or _default_context(resolved, limits)
    if limits.trained is not None and context > limits.trained:
        raise ModelError(f"--context-length {context} is above what the model was made for, {limits.trained}")
    if block_size > context:
        raise ModelError(f"--kv-block-size {block_size} is above the context, {context}")
    # The pool counts in whole blocks, so the rest of the context could not be used.
    context = context // block_size * block_size
    fits = _rows_that_fit(resolved, limits, context)
    if settings.max_num_seqs > fits:
        raise ModelError(
            f"--max-num-seqs {settings.max_num_seqs} needs room for as many contexts of {context} tokens, there is "
            f"room for {fits}: pass a smaller --context-length, fewer, or more --kv-tokens or --kv-budget"
        )
    num_seqs = min(resolved.max_num_seqs, fits)
    return CacheSize(block_size, context, num_seqs, min(fits, _num_rows(num_seqs)))


def _num_rows(num_seqs: int) -> int:
    """Returns the rows for `num_seqs` sequences and for idle prefixes."""
    return num_seqs + max(4, num_seqs // 2)


def _default_context(settings: EngineSettings, limits: CacheLimits) -> int:
    """Returns a context that the model was trained for and that fits.

    It is the longest with which each sequence and each idle prefix can have a row, so that a longer context never means
    fewer sequences, but at least a short one."""
    if settings.kv_tokens or settings.kv_limit_bytes or limits.pool_bytes or limits.free_bytes is None:
        longest = _SHORT_CONTEXT
    else:
        share = limits.free_bytes * settings.memory_share / settings.memory_parts / _DEFAULT_MEMORY_SHARE
        longest = max(_SHORT_CONTEXT, int(share) // (limits.bytes_per_token * _num_rows(settings.max_num_seqs)))
    allowed = [limits.trained or _SHORT_CONTEXT, min(longest, _MAX_CONTEXT)]
    if settings.kv_tokens:
        allowed.append(max(settings.kv_tokens, settings.kv_block_size))
    if settings.kv_limit_bytes:
        allowed.append(max(settings.kv_limit_bytes // limits.bytes_per_token, settings.kv_block_size))
    return min(allowed)


def _rows_that_fit(settings: EngineSettings, limits: CacheLimits, context: int) -> int:
    """Raises ModelError if there is no room for one row."""
    row_bytes = context * limits.bytes_per_token
    allowed = [(_MAX_ROWS, "")]
    if settings.kv_tokens:
        allowed.append((settings.kv_tokens // context, f"--kv-tokens {settings.kv_tokens} are"))
    if budget := limits.pool_bytes or settings.kv_limit_bytes:
        allowed.append((budget // row_bytes, f"the {budget} bytes of --kv-budget are"))
    elif not settings.kv_tokens and limits.free_bytes is not None:
        rows = limits.free_bytes // row_bytes
        # One row is allowed as long as it fits at all.
        share = max(rows // _DEFAULT_MEMORY_SHARE, min(rows, 1))
        allowed.append((share, f"the {limits.free_bytes} bytes free are"))
    fits, what = min(allowed)
    if not fits:
        raise ModelError(
            f"{what} too few for one context of {context} tokens, which takes {row_bytes} bytes: pass a smaller "
            "--context-length"
        )
    return fits
