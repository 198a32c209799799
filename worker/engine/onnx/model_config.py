"""What the small files beside a graph say of the model's sizes."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenbus.worker.engine.models import generation_config
from tokenbus.worker.engine.onnx import genai_config
from tokenbus.worker.engine.onnx.graphs.graph import HeadSizes


class _Config(msgspec.Struct, frozen=True):
    """The fields of `config.json` that have a meaning here."""

    max_position_embeddings: int | None = None
    n_positions: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = True
    num_key_value_heads: int | None = None
    num_attention_heads: int | None = None
    hidden_size: int | None = None
    head_dim: int | None = None


class ModelConfig(NamedTuple):
    """None where the files don't say."""

    context_length: int | None
    """Tokens that the model was trained for."""
    sliding_window: int | None
    """Tokens that a token looks back on, at most."""
    head_sizes: HeadSizes


def read(sidecars: dict[str, Path]) -> ModelConfig:
    """Raises ModelError naming a file that is wrong."""
    config = generation_config.read_json(sidecars.get("config.json"), _Config)
    said = genai_config.read(sidecars.get(genai_config.NAME))
    width = config.head_dim
    if width is None and config.hidden_size and config.num_attention_heads:
        width = config.hidden_size // config.num_attention_heads
    return ModelConfig(
        context_length=config.max_position_embeddings or config.n_positions or said.context_length,
        sliding_window=config.sliding_window if config.use_sliding_window else None,
        head_sizes=HeadSizes(
            kv_heads=said.decoder.num_key_value_heads or config.num_key_value_heads or config.num_attention_heads,
            head_width=said.decoder.head_size or width,
        ),
    )
