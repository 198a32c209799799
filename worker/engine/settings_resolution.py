"""Fills in the settings that a user left open, and refuses those that an engine can't meet.

This is the part that all engines share; gguf/settings_resolution.py and onnx/settings_resolution.py add their own."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.files.model_config import GenerationConfig

AUTO = -1
"""The value of a setting that is left to the engine, where 0 has its own meaning."""
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_NUM_SEQS = 16


class SettingRule(NamedTuple):
    """A condition that a setting must meet."""

    flag: str
    value: object
    holds: bool
    allowed: str
    """The allowed values, as worded in the error message."""


def require(rules: Iterable[SettingRule]) -> None:
    """Raises ModelError for the first rule that does not hold, naming the setting and its allowed values."""
    for rule in rules:
        if not rule.holds:
            raise ModelError(f"{rule.flag} must be {rule.allowed}, got {rule.value}")


def resolve(settings: EngineSettings, generation_config: GenerationConfig, *, max_num_seqs: int) -> EngineSettings:
    """Fills in sizes from the model's own recommendations, or else from defaults. A size of 0 stays open.

    A recommendation of more sequences than `max_num_seqs` is lowered to that."""
    block_size, num_seqs = settings.kv_block_size, settings.max_num_seqs
    if block_size == AUTO:
        block_size = generation_config.kv_block_size or _DEFAULT_BLOCK_SIZE
    if num_seqs == AUTO:
        num_seqs = min(generation_config.max_num_seqs or _DEFAULT_NUM_SEQS, max_num_seqs)
    return msgspec.structs.replace(
        settings,
        context_length=settings.context_length or generation_config.context_length or 0,
        max_num_seqs=num_seqs,
        kv_block_size=block_size,
        kv_tokens=settings.kv_tokens or (generation_config.total_kv_blocks or 0) * block_size,
    )


def common_rules(settings: EngineSettings, *, max_num_seqs: int) -> Iterator[SettingRule]:
    """Yields the rules for settings that every engine has, before or after `resolve`."""
    num_seqs, block_size = settings.max_num_seqs, settings.kv_block_size
    batched, least = settings.max_num_batched_tokens, max(num_seqs, 1)
    scheduler = settings.scheduler
    yield SettingRule(
        "--max-num-seqs", num_seqs, num_seqs == AUTO or 1 <= num_seqs <= max_num_seqs, f"1 to {max_num_seqs}"
    )
    yield SettingRule("--kv-block-size", block_size, block_size == AUTO or block_size >= 1, "at least 1")
    yield SettingRule("--max-num-batched-tokens", batched, batched > least, f"above --max-num-seqs ({least})")
    yield SettingRule("--threads", settings.threads, settings.threads >= 0, "0 or more")
    yield SettingRule("--expected-tokens", scheduler.expected_tokens, scheduler.expected_tokens >= 0, "0 or more")
    yield SettingRule("--priority-s", scheduler.priority_s, 0 <= scheduler.priority_s <= 3_600, "0 to 3,600")
    yield SettingRule("--host-cache-mib", settings.host_cache_mib, settings.host_cache_mib >= AUTO, "0 or more")
