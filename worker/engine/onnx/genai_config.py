"""What a `genai_config.json` says, as the builder of onnxruntime-genai writes it."""

from pathlib import Path

import msgspec

from tokenbus.worker.engine.models import generation_config

NAME = "genai_config.json"


class Decoder(msgspec.Struct, frozen=True):
    filename: str | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None


class Model(msgspec.Struct, frozen=True):
    context_length: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder: Decoder = Decoder()


class _Config(msgspec.Struct, frozen=True):
    model: Model = Model()


def read(path: Path | None) -> Model:
    """Nothing where there is no such file. Raises ModelError naming one that is wrong."""
    return generation_config.read_json(path, _Config).model
