"""Reads what the files next to a model's weights say: its sizes, how its hidden states become embeddings, and what they
recommend: sampling defaults, end tokens, and sizes for the engine.

Hugging Face transformers writes `config.json` and `generation_config.json`, sentence-transformers
`1_Pooling/config.json`. The model builder of onnxruntime-genai writes `genai_config.json`, which says more about the
graph. Recommended sizes come from `metadata.json`. The sizes in `config.json` are declared only here: conversion, the
ONNX engine and the memory estimate before loading all read them from here.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from tokenbus.protocol.wire.params import SamplingParams, ranges_of
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.model_files import read_json
from tokenbus.worker.files.regular import MAX_CONFIG_BYTES, read_regular

_WIDE = ("float32", "torch.float32")


_MAX_TOKEN_IDS = 1_024
_MAX_SIZE = (1 << 31) - 1
Size = Annotated[int, msgspec.Meta(ge=-_MAX_SIZE - 1, le=_MAX_SIZE)]
"""A number of things in a model's file. Larger ones than any model has are refused where they are read."""
Limit = int | float
"""A limit in a model's file. Some have 1e30 for none."""
TokenIds = Size | Annotated[list[Size], msgspec.Meta(max_length=_MAX_TOKEN_IDS)] | None


class ModelSizes(msgspec.Struct, frozen=True):
    """The sizes of a model; 0 and None for those that the file does not say."""

    architectures: list[str] = []
    hidden_size: Size = 0
    num_hidden_layers: Size = 0
    num_attention_heads: Size = 0
    num_key_value_heads: Size = 0
    head_dim: Size = 0
    vocab_size: Size = 0
    max_position_embeddings: Size = 0
    n_positions: Size = 0
    sliding_window: Size | None = None
    use_sliding_window: bool = True
    dtype: str = ""
    torch_dtype: str = ""
    """The older name of `dtype`."""

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)

    @property
    def trained_context(self) -> int:
        """The context length for which the model was trained."""
        return self.max_position_embeddings or self.n_positions

    @property
    def window(self) -> int | None:
        """The most tokens that a token attends to; None for all."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def weight_bits(self) -> float:
        """The bits per weight as published."""
        return 32.0 if (self.dtype or self.torch_dtype) in _WIDE else 16.0


_LIMITS = ("max_position_embeddings", "n_positions", "sliding_window")
SizesT = TypeVar("SizesT", bound=ModelSizes)


def read_sizes(path: Path | None, kind: type[SizesT]) -> SizesT:
    """Returns the defaults if there is no file. A null field counts as missing, as it does for transformers. Raises
    ModelError naming a file that is malformed."""
    if path is None:
        return kind()
    try:
        fields = msgspec.json.decode(read_regular(path, MAX_CONFIG_BYTES), type=dict[str, object])
        if isinstance(text := fields.get("text_config"), dict):  # of a model that also reads images
            fields |= {name: one for name, one in text.items() if one is not None and name != "architectures"}
        fields |= {name: min(one, _MAX_SIZE) for name in _LIMITS if isinstance(one := fields.get(name), int | float)}
        return msgspec.convert({name: one for name, one in fields.items() if one is not None}, kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; correct or remove it") from error


GENAI_CONFIG = "genai_config.json"
POOLING_CONFIG = "1_Pooling/config.json"


class GenaiDecoder(msgspec.Struct, frozen=True):
    """The part of `genai_config.json` about the graph that generates."""

    filename: str | None = None
    num_key_value_heads: Size | None = None
    head_size: Size | None = None
    num_attention_heads: Size = 0
    hidden_size: Size = 0


class GenaiModel(msgspec.Struct, frozen=True):
    """The fields of `genai_config.json` that matter here."""

    type: str = ""
    context_length: Limit | None = None
    eos_token_id: TokenIds = None
    decoder: GenaiDecoder = GenaiDecoder()


class _GenaiConfig(msgspec.Struct, frozen=True):
    model: GenaiModel = GenaiModel()


class _Pooling(msgspec.Struct, frozen=True):
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class HeadSizes(NamedTuple):
    """The sizes of the KV cache, for graphs that leave them open. None if the files don't say."""

    kv_heads: int | None = None
    head_width: int | None = None


class OnnxModelConfig(NamedTuple):
    """The sizes of a model. None if the files don't say."""

    context_length: int | None
    """The number of tokens that the model was trained for."""
    sliding_window: int | None
    """The most tokens that a token attends to."""
    head_sizes: HeadSizes
    num_heads: int = 0
    """The number of a layer's attention heads; 0 if the files don't say. So with `width`, that of a hidden state."""
    width: int = 0
    architecture: str = ""
    """The name of its transformers class without the task, in lower case, such as `llama`; empty if unknown."""


def read_onnx_config(sidecars: dict[str, Path]) -> OnnxModelConfig:
    """Raises ModelError naming a file that is malformed."""
    config = read_sizes(sidecars.get("config.json"), ModelSizes)
    genai = read_genai(sidecars)
    # heads of unknown number say nothing about their width
    width = config.head_size if config.head_dim or config.num_attention_heads else None
    return OnnxModelConfig(
        context_length=config.trained_context or _bounded(genai.context_length),
        sliding_window=config.window,
        head_sizes=HeadSizes(
            kv_heads=genai.decoder.num_key_value_heads or config.kv_heads or None,
            head_width=genai.decoder.head_size or width or None,
        ),
        num_heads=config.num_attention_heads or genai.decoder.num_attention_heads,
        width=config.hidden_size or genai.decoder.hidden_size,
        architecture=next(iter(config.architectures), genai.type).lower().removesuffix("forcausallm"),
    )


def read_genai(sidecars: dict[str, Path]) -> GenaiModel:
    """Returns empty fields if there is no `genai_config.json`. Raises ModelError if it is malformed."""
    return read_json(sidecars.get(GENAI_CONFIG), _GenaiConfig).model


def pooling_mode(asked: str, sidecars: dict[str, Path], *, generates: bool) -> str:
    """Returns the requested mode, or for `auto` the one that suits the model. Raises ModelError."""
    if asked != "auto":
        return asked
    found = read_json(sidecars.get(POOLING_CONFIG), _Pooling)
    if found.pooling_mode_cls_token:
        return "cls"
    if found.pooling_mode_mean_tokens:
        return "mean"
    return "last" if found.pooling_mode_lasttoken or generates else "mean"


_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters that generation_config.json may recommend."""


class _Scheduler(msgspec.Struct, frozen=True):
    max_num_seqs: Size | None = None
    max_paddings: Size | None = None


class _KvCache(msgspec.Struct, frozen=True):
    block_size: Size | None = None
    total_blocks: Size | None = None


class _Llm(msgspec.Struct, frozen=True):
    max_sequence_length: Size | None = None
    max_seq_len: Size | None = None
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
    top_k: Limit | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Limit | None = None
    max_length: Limit | None = None
    """The most tokens of prompt and completion together."""
    eos_token_id: TokenIds = None
    eos_token_ids: TokenIds = None
    bos_token_id: TokenIds = None


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


def read_generation_config(sidecars: dict[str, Path], in_weights: dict[str, float]) -> GenerationConfig:
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
        if value is not None and not math.isnan(value):
            chosen[name] = _clamped(name, value)
    # 0 means that the file leaves it open.
    if longest := _bounded(generation.max_new_tokens or generation.max_length):
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


def _bounded(limit: float | None) -> int | None:
    return None if limit is None else int(min(limit, _MAX_SIZE))


def _clamped(name: str, value: float) -> float | int:
    """Clamps a value to its range: some files have 0 for top_p, and -1 for top_k."""
    bounded = ranges_of(SamplingParams)[name].clamp(value)
    return int(bounded) if name == "top_k" else float(bounded)
