"""What a model's own files advise: how to sample, where to stop, and how much of it to run at once."""

from pathlib import Path
from typing import TypeVar

import msgspec

from tokenbus.protocol.wire.params import SamplingParams, ranges_of
from tokenbus.worker.engine.runner import ModelError


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


class _Inner(msgspec.Struct, frozen=True):
    llm: _Llm = _Llm()


class _MetadataFile(msgspec.Struct, frozen=True):
    """`metadata.json`: with or without a level `metadata` around `llm`."""

    metadata: _Inner = _Inner()
    llm: _Llm | None = None


class _GenerationFile(msgspec.Struct, frozen=True):
    """The fields of `generation_config.json` that have a meaning here, some of which `config.json` has too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | list[int] | None = None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """None where the files say nothing."""

    defaults: SamplingParams = SamplingParams()
    end_token_ids: frozenset[int] = frozenset()
    context_length: int | None = None
    max_num_seqs: int | None = None
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_paddings: int | None = None


def read(sidecars: dict[str, Path], in_weights: dict[str, float]) -> GenerationConfig:
    """Of the small files beside the weights. Raises ModelError naming a file that is wrong.

    `in_weights` are sampling defaults that the weights carry themselves, under the names of `SamplingParams`; the
    files come first."""
    generation = read_json(sidecars.get("generation_config.json"), _GenerationFile)
    config = read_json(sidecars.get("config.json"), _GenerationFile)
    llm = _llm(read_json(sidecars.get("metadata.json"), _MetadataFile))
    chosen = SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = getattr(generation, name)
        value = in_weights.get(name) if value is None else value
        if value is not None:
            chosen = msgspec.structs.replace(chosen, **{name: _clamped(name, value)})
    if generation.max_new_tokens:
        chosen = msgspec.structs.replace(chosen, max_tokens=max(1, generation.max_new_tokens))
    return GenerationConfig(
        defaults=chosen,
        end_token_ids=_to_ids(generation.eos_token_id) | _to_ids(config.eos_token_id),
        context_length=llm.max_sequence_length,
        max_num_seqs=llm.scheduler.max_num_seqs,
        kv_block_size=llm.kv_cache.block_size,
        total_kv_blocks=llm.kv_cache.total_blocks,
        max_paddings=llm.scheduler.max_paddings,
    )


StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_json(path: Path | None, kind: type[StructT]) -> StructT:
    """What a JSON file says; the defaults where there is none. Raises ModelError naming a file that is wrong."""
    if path is None:
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; correct it or take it away") from error


def _llm(metadata: _MetadataFile) -> _Llm:
    return metadata.llm or metadata.metadata.llm


def _to_ids(given: int | list[int] | None) -> frozenset[int]:
    ids = [given] if isinstance(given, int) else given or []
    return frozenset(token_id for token_id in ids if token_id >= 0)


def _clamped(name: str, value: float) -> float | int:
    """Moves a value into its range: some files have 0 for top_p, and -1 for top_k."""
    bounded = ranges_of(SamplingParams)[name].clamp(value)
    return int(bounded) if name == "top_k" else float(bounded)
