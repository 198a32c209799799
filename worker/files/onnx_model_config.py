"""Reads the files next to a graph: the sizes of the model, and how its hidden states become embeddings.

`config.json` is written by Hugging Face transformers, and `1_Pooling/config.json` by sentence-transformers. The model
builder of onnxruntime-genai writes `genai_config.json`, which says more about the graph."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenbus.worker.files import config_json
from tokenbus.worker.files.model_files import read_json

GENAI_CONFIG = "genai_config.json"
POOLING_CONFIG = "1_Pooling/config.json"


class GenaiDecoder(msgspec.Struct, frozen=True):
    """The part of `genai_config.json` about the graph that generates."""

    filename: str | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None
    num_attention_heads: int = 0
    hidden_size: int = 0


class GenaiModel(msgspec.Struct, frozen=True):
    """The fields of `genai_config.json` that matter here."""

    type: str = ""
    context_length: int | None = None
    eos_token_id: int | list[int] | None = None
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


def read(sidecars: dict[str, Path]) -> OnnxModelConfig:
    """Raises ModelError naming a file that is malformed."""
    config = config_json.read(sidecars.get("config.json"), config_json.ModelSizes)
    genai = read_genai(sidecars)
    # heads of unknown number say nothing about their width
    width = config.head_size if config.head_dim or config.num_attention_heads else None
    return OnnxModelConfig(
        context_length=config.trained_context or genai.context_length,
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
