"""The size of a token's keys and values, from a GGUF's metadata."""

from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.process.settings import EngineSettings

_BLOCK_BYTES = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
}
"""For each cache type the values in one of ggml's blocks, and the bytes that such a block takes."""


def bytes_per_token(metadata: Metadata, settings: EngineSettings) -> int:
    """Returns the size of one token's keys and values, for a model whose layers all attend; others take less."""
    arch = metadata.text("general.architecture") or ""
    layers = metadata.number(f"{arch}.block_count")
    heads = metadata.number(f"{arch}.attention.head_count")
    heads = heads or max(metadata.ints(f"{arch}.attention.head_count"), default=1)
    width = metadata.number(f"{arch}.embedding_length") // heads
    key_width = metadata.number(f"{arch}.attention.key_length") or width
    value_width = metadata.number(f"{arch}.attention.value_length") or width
    # Most models have one number of KV heads for all layers; some have a list with one for each layer.
    per_layer = metadata.ints(f"{arch}.attention.head_count_kv")
    kv_heads = sum(per_layer) or layers * (metadata.number(f"{arch}.attention.head_count_kv") or heads)
    return kv_heads * (_size(key_width, settings.cache_type_k) + _size(value_width, settings.cache_type_v))


def _size(count: int, cache_type: str) -> int:
    per_block, size = _BLOCK_BYTES[cache_type]
    return count * size // per_block
