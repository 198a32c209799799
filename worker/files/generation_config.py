"""Reads what a model's files recommend: sampling defaults, end tokens, and sizes for the engine.

Sampling defaults come from Hugging Face transformers' `generation_config.json`, or else from the weights themselves.
Sizes come from `metadata.json`."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenbus.protocol.wire.params import SamplingParams, ranges_of
from tokenbus.worker.files.model_files import read_json

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters that generation_config.json may recommend."""


class _Scheduler(msgspec.Struct, frozen=True):
    max_num_seqs: int | None = None
    max_paddings: int | None = None


class _KvCache(msgspec.Struct, frozen=True):
    block_size: int | None = None
    total_blocks: int | None = None


class _Llm(msgspec.Struct, frozen=True):
    max_sequence_length: int | None = None
    max_seq_len: int | None = None
    """Another name for the same."""
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
    max_length: int | None = None
    """The most tokens of prompt and completion together."""
    eos_token_id: int | list[int] | None = None
    eos_token_ids: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The recommendations of a model's files. None if they recommend nothing."""

    defaults: SamplingParams = SamplingParams()
    end_token_ids: frozenset[int] = frozenset()
    bos_token_ids: frozenset[int] = frozenset()
    """Tokens with which texts begin. A model that samples one has begun another text, unless it is an ordinary
    token."""
    context_length: int | None = None
    max_num_seqs: int | None = None
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_paddings: int | None = None


def read(sidecars: dict[str, Path], in_weights: dict[str, float]) -> GenerationConfig:
    """Reads the sidecars, which take precedence over the sampling defaults `in_weights`, named as in `SamplingParams`.

    Raises ModelError naming a file that is malformed."""
    generation = read_json(sidecars.get("generation_config.json"), _GenerationFile)
    config = read_json(sidecars.get("config.json"), _GenerationFile)
    metadata = read_json(sidecars.get("metadata.json"), _MetadataFile)
    llm = metadata.llm or metadata.metadata.llm
    chosen: dict[str, float] = {}
    for name in _NAMES:
        value = getattr(generation, name)
        value = in_weights.get(name) if value is None else value
        if value is not None:
            chosen[name] = _clamped(name, value)
    # 0 means that the file leaves it open.
    if longest := generation.max_new_tokens or generation.max_length:
        chosen["max_tokens"] = max(1, longest)
    return GenerationConfig(
        defaults=msgspec.structs.replace(SamplingParams(), **chosen),
        end_token_ids=frozenset().union(
            *(to_token_ids(ids) for one in (generation, config) for ids in (one.eos_token_id, one.eos_token_ids))
        ),
        bos_token_ids=to_token_ids(generation.bos_token_id),
        context_length=llm.max_sequence_length or llm.max_seq_len,
        max_num_seqs=llm.scheduler.max_num_seqs,
        kv_block_size=llm.kv_cache.block_size,
        total_kv_blocks=llm.kv_cache.total_blocks,
        max_paddings=llm.scheduler.max_paddings,
    )


def end_token_ids(config: GenerationConfig, special: Iterable[int]) -> frozenset[int]:
    """Returns the tokens that end a completion according to the model's files. `special` are the vocabulary's tokens
    without text: some files name an ordinary token as the one with which texts begin."""
    return config.end_token_ids | config.bos_token_ids & frozenset(special)


def to_token_ids(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """Converts the value of an `eos_token_id`, in which a negative id means that there is none."""
    ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
    return frozenset(token_id for token_id in ids if token_id >= 0)


def _clamped(name: str, value: float) -> float | int:
    """Clamps a value to its range: some files have 0 for top_p, and -1 for top_k."""
    bounded = ranges_of(SamplingParams)[name].clamp(value)
    return int(bounded) if name == "top_k" else float(bounded)
