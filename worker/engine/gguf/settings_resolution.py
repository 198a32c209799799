"""Decides which settings llama.cpp can meet. Needs the library's limits, but no model."""

from collections.abc import Iterator

from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import CHOICES, EngineSettings
from tokenbus.worker.convert import converted
from tokenbus.worker.engine.settings_resolution import SettingRule, common_rules, require
from tokenbus.worker.engine.settings_resolution import resolve as resolve_common
from tokenbus.worker.files import number_types
from tokenbus.worker.files.model_config import GenerationConfig

CACHE_TYPES = {kind.name: kind.ggml for kind in number_types.ALL}
_WITHOUT_FLASH_ATTENTION = ("f32", "f16", "bf16")
FLASH_ATTENTION = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
SPLIT_MODES = {
    "none": llama.LLAMA_SPLIT_MODE_NONE,
    "layer": llama.LLAMA_SPLIT_MODE_LAYER,
    "row": llama.LLAMA_SPLIT_MODE_ROW,
    "tensor": llama.LLAMA_SPLIT_MODE_TENSOR,
}
_SPLIT_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""The types of keys and values that can be split within a layer; with others llama.cpp aborts."""


def resolve(settings: EngineSettings, generation_config: GenerationConfig) -> EngineSettings:
    """Fills in the settings that were left open. Raises ModelError for those that can't be met."""
    settings = resolve_common(settings, generation_config, max_num_seqs=_max_num_seqs())
    validate(settings)
    return settings


def validate(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met, and its allowed values."""
    require(common_rules(settings, max_num_seqs=_max_num_seqs()))
    require(_rules(settings))
    if settings.flash_attention == "off" and settings.cache_type_v not in _WITHOUT_FLASH_ATTENTION:
        raise ModelError(
            f"--cache-type-v {settings.cache_type_v} needs flash attention: leave --flash-attention at auto or on"
        )


def check_tensor_split(settings: EngineSettings, num_devices: int) -> None:
    """Raises ModelError if layers should be split within, but the number of devices or other settings don't allow that:
    llama.cpp would end the process."""
    if settings.split_mode != "tensor":
        return
    if num_devices < 2:
        raise ModelError(f"--split-mode tensor needs two GPUs or more, and there are {num_devices}; pass layer")
    if settings.flash_attention == "off":
        raise ModelError("--split-mode tensor needs flash attention: leave --flash-attention at auto or on")
    for name, kind in (("k", settings.cache_type_k), ("v", settings.cache_type_v)):
        if kind not in _SPLIT_CACHE_TYPES:
            allowed = ", ".join(_SPLIT_CACHE_TYPES)
            raise ModelError(f"--cache-type-{name} must be one of {allowed} with --split-mode tensor, got {kind}")


def _max_num_seqs() -> int:
    """Returns one less than llama.cpp allows: a sequence is reserved for copies."""
    return int(llama.llama_max_parallel_sequences()) - 1


def _rules(settings: EngineSettings) -> Iterator[SettingRule]:
    context, kv = settings.context_length, settings.kv_tokens
    least_kv = max(context, settings.kv_block_size, 1)
    yield SettingRule("--context-length", context, context == 0 or context >= 2, "at least 2, or 0 to have it chosen")
    yield SettingRule("--kv-tokens", kv, kv == 0 or kv >= least_kv, f"one block and one context at least ({least_kv})")
    yield SettingRule("--ubatch-tokens", settings.ubatch_tokens, settings.ubatch_tokens >= 1, "at least 1")
    yield SettingRule("--max-embed-tokens", settings.max_embed_tokens, settings.max_embed_tokens >= 0, "0 or more")
    kind = settings.quantize
    yield SettingRule("--quantize", kind, kind in ("", *converted.TYPES), f"one of {', '.join(converted.TYPES)}")
    for name, known in CHOICES.items():
        value = getattr(settings, name)
        yield SettingRule(f"--{name.replace('_', '-')}", value, value in known, f"one of {', '.join(known)}")
