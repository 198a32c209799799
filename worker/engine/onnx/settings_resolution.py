"""Decides which settings an ONNX engine can meet, and how large its cache is."""

from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import CHOICES, EngineSettings
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.onnx.device import EXECUTION_PROVIDERS, named
from tokenbus.worker.engine.settings_resolution import AUTO, SettingRule, common_rules, require, resolve
from tokenbus.worker.files.model_config import GenerationConfig

_SHORT_CONTEXT = 4_096
"""The default context of rows that are a fixed part of memory, if the model was made for that much."""
MAX_ROWS = 256
_LEAST_ROWS = 4
"""If rows are a fixed part of memory, a context is chosen of which there are at least this many."""
_PROVIDERS = ("auto", *EXECUTION_PROVIDERS)
_GGUF_ONLY = (
    "cache_type_k",
    "cache_type_v",
    "flash_attention",
    "gpu_layers",
    "main_gpu",
    "split_mode",
    "tensor_split",
    "ubatch_tokens",
)
"""Settings that have no meaning here. They are refused rather than silently ignored."""


class CacheSize(NamedTuple):
    """The size of the cache: rows for running sequences and for idle prefixes, each as long as a context, and the
    tokens that all of them together may hold."""

    block_size: int
    context_length: int
    """The tokens of one sequence, and of one row: a multiple of the block size."""
    max_num_seqs: int
    num_rows: int
    kv_tokens: int

    @property
    def total_blocks(self) -> int:
        return self.kv_tokens // self.block_size


class CacheLimits(NamedTuple):
    """The limits set by a model and its device."""

    trained: int | None
    """The tokens that the model was trained for; None if its files don't say."""
    bytes_per_token: int
    pool_bytes: int = 0
    """The memory that the cache may borrow in full; 0 if it has its own limit."""
    padding_tokens: int = 0
    """Tokens of memory for padding, beside those of the cache."""
    has_own_rows: bool = False
    """Whether a row takes memory only for the tokens that it holds, and the memory is this cache's alone."""


def validate(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met, and its allowed values."""
    default = EngineSettings(model="")
    for name in _GGUF_ONLY:
        if getattr(settings, name) != getattr(default, name):
            raise ModelError(f"--{name.replace('_', '-')} is for --engine gguf; remove it")
    require(common_rules(settings, max_num_seqs=MAX_ROWS))
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
    return fit.PADDING_TOKENS if generation_config.max_paddings is None else generation_config.max_paddings


def size_cache(settings: EngineSettings, generation_config: GenerationConfig, limits: CacheLimits) -> CacheSize:
    """Returns the size of a cache. Every row can hold a whole context, and if rows are a fixed part of memory, all of
    them can at the same time.

    Raises ModelError if not even one context fits, or fewer than requested, or if a recommendation of the model can't
    be met."""
    resolved = resolve(settings, generation_config, max_num_seqs=MAX_ROWS)
    validate(resolved)
    block_size, context = resolved.kv_block_size, resolved.context_length or _default_context(resolved, limits)
    if limits.trained is not None and context > limits.trained:
        raise ModelError(f"--context-length {context} is above what the model was made for, {limits.trained}")
    if block_size > context:
        raise ModelError(f"--kv-block-size {block_size} is above the context, {context}")
    # The pool counts in whole blocks, so the rest of the context could not be used.
    context = context // block_size * block_size
    if limits.has_own_rows:
        num_rows = min(_num_rows(resolved.max_num_seqs), MAX_ROWS)
        tokens = _tokens_that_fit(resolved, limits, context)
        return CacheSize(block_size, context, resolved.max_num_seqs, num_rows, tokens)
    fits = _rows_that_fit(resolved, limits, context)
    if settings.max_num_seqs > fits:
        raise ModelError(
            f"--max-num-seqs {settings.max_num_seqs} needs room for as many contexts of {context} tokens, there is "
            f"room for {fits}: pass a smaller --context-length, fewer, or more --kv-tokens or --kv-budget"
        )
    num_seqs = min(resolved.max_num_seqs, fits)
    num_rows = min(fits, _num_rows(num_seqs))
    return CacheSize(block_size, context, num_seqs, num_rows, num_rows * context)


def short_enough(length: int, kv_tokens: int) -> int:
    """Returns a context of which a few rows fit into that many tokens, up to `length`."""
    return min(length, max(kv_tokens // _LEAST_ROWS, min(kv_tokens, _SHORT_CONTEXT)))


def _num_rows(num_seqs: int) -> int:
    """Returns the rows for `num_seqs` sequences and for idle prefixes."""
    return num_seqs + max(4, num_seqs // 2)


def _default_context(settings: EngineSettings, limits: CacheLimits) -> int:
    """Returns a context that the model was trained for and that fits."""
    allowed = [limits.trained or _SHORT_CONTEXT, _SHORT_CONTEXT]
    if settings.kv_tokens:
        allowed.append(max(settings.kv_tokens, settings.kv_block_size))
    if settings.kv_limit_bytes:
        allowed.append(max(settings.kv_limit_bytes // limits.bytes_per_token, settings.kv_block_size))
    return min(allowed)


def _tokens_that_fit(settings: EngineSettings, limits: CacheLimits, context: int) -> int:
    """Returns the tokens of all rows together. Raises ModelError if there are too few for one context."""
    allowed = [(settings.kv_tokens or context, f"--kv-tokens {settings.kv_tokens} are")]
    if settings.kv_limit_bytes:  # less a context, for copies of shared prefixes
        fits = settings.kv_limit_bytes // limits.bytes_per_token - context - limits.padding_tokens
        allowed.append((fits, f"the {settings.kv_limit_bytes} bytes of the memory budget are"))
    return _checked(min(allowed), context, context * limits.bytes_per_token, 1)


def _rows_that_fit(settings: EngineSettings, limits: CacheLimits, context: int) -> int:
    """Returns the rows that fit. Raises ModelError if there is no room for one."""
    row_bytes = context * limits.bytes_per_token
    allowed = [(MAX_ROWS * context, "")]
    if settings.kv_tokens:
        allowed.append((settings.kv_tokens, f"--kv-tokens {settings.kv_tokens} are"))
    if budget := limits.pool_bytes or settings.kv_limit_bytes:
        allowed.append((budget // limits.bytes_per_token, f"the {budget} bytes of --kv-budget are"))
    return _checked(min(allowed), context, row_bytes, context)


def _checked(allowed: tuple[int, str], context: int, row_bytes: int, unit: int) -> int:
    """Returns the whole units in a number of tokens. Raises ModelError, saying what they are, if they are too few for a
    context."""
    tokens, what = allowed
    if tokens < context:
        raise ModelError(
            f"{what} too few for one context of {context} tokens, which takes {row_bytes} bytes: pass a smaller "
            "--context-length"
        )
    return tokens // unit
