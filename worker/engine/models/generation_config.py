"""Reads what a model's files recommend: sampling defaults, end tokens, and sizes for the engine.

Sampling defaults come from `generation_config.json`, as Hugging Face transformers writes it, and otherwise from the
weights themselves. Sizes come from `metadata.json`."""

from pathlib import Path

import msgspec

from tokenbus.worker import contract
from tokenbus.worker.engine.models.model_files import read_json

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
"""The ranges that requests must keep (wire.md). Values outside are clamped: some files have a top_p of 0 or a top_k of
-1, and the nearest valid value means the same."""


class _Scheduler(msgspec.Struct, frozen=True):
    max_num_seqs: int | None = None
    max_paddings: int | None = None


class _KvCache(msgspec.Struct, frozen=True):
    block_size: int | None = None
    total_blocks: int | None = None


class _Llm(msgspec.Struct, frozen=True):
    max_sequence_length: int | None = None
    scheduler: _Scheduler = _Scheduler()
    kv_cache: _KvCache = _KvCache()


class _Wrapper(msgspec.Struct, frozen=True):
    llm: _Llm = _Llm()


class _MetadataFile(msgspec.Struct, frozen=True):
    """`metadata.json`, in which `llm` may be wrapped in an object `metadata`."""

    metadata: _Wrapper = _Wrapper()
    llm: _Llm | None = None


class _GenerationFile(msgspec.Struct, frozen=True):
    """The fields of `generation_config.json` that matter here; `config.json` has some of them too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | list[int] | None = None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The recommendations of a model's files. None if they recommend nothing."""

    defaults: contract.SamplingDefaults = contract.SamplingDefaults()
    end_token_ids: frozenset[int] = frozenset()
    context_length: int | None = None
    max_num_seqs: int | None = None
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_paddings: int | None = None


def read(sidecars: dict[str, Path], in_weights: dict[str, float]) -> GenerationConfig:
    """Reads the sidecars, which take precedence over the sampling defaults `in_weights`, named as `SamplingDefaults`.

    Raises ModelError naming a file that is malformed."""
    generation = read_json(sidecars.get("generation_config.json"), _GenerationFile)
    config = read_json(sidecars.get("config.json"), _GenerationFile)
    metadata = read_json(sidecars.get("metadata.json"), _MetadataFile)
    llm = metadata.llm or metadata.metadata.llm
    chosen: dict[str, float] = {}
    for name in _RANGES:
        value = getattr(generation, name)
        value = in_weights.get(name) if value is None else value
        if value is not None:
            chosen[name] = _clamped(name, value)
    # 0 means that the file leaves it open.
    if generation.max_new_tokens:
        chosen["max_tokens"] = max(1, generation.max_new_tokens)
    return GenerationConfig(
        defaults=msgspec.structs.replace(contract.SamplingDefaults(), **chosen),
        end_token_ids=to_token_ids(generation.eos_token_id) | to_token_ids(config.eos_token_id),
        context_length=llm.max_sequence_length,
        max_num_seqs=llm.scheduler.max_num_seqs,
        kv_block_size=llm.kv_cache.block_size,
        total_kv_blocks=llm.kv_cache.total_blocks,
        max_paddings=llm.scheduler.max_paddings,
    )


def to_token_ids(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """Converts the value of an `eos_token_id`, in which a negative id means that there is none."""
    ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
    return frozenset(token_id for token_id in ids if token_id >= 0)


def _clamped(name: str, value: float) -> float | int:
    low, high = _RANGES[name]
    bounded = min(max(value, low), high)
    return int(bounded) if name == "top_k" else float(bounded)
