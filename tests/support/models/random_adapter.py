"""Writes LoRA adapters with random weights."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.support.models.shape import Shape


def shapes_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns the outputs and inputs of each matrix in the layers of a model, by llama.cpp's name."""
    kv_width = shape.width // shape.heads * shape.kv_heads
    matrices = {
        "attn_q": (shape.width, shape.width),
        "attn_k": (kv_width, shape.width),
        "attn_v": (kv_width, shape.width),
        "attn_output": (shape.width, shape.width),
        "ffn_gate": (shape.feed_forward, shape.width),
        "ffn_up": (shape.feed_forward, shape.width),
        "ffn_down": (shape.width, shape.feed_forward),
    }
    return {f"blk.{layer}.{name}.weight": sizes for layer in range(shape.layers) for name, sizes in matrices.items()}


def write(
    path: Path,
    seed: int,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 16,
    architecture: str = "llama",
    spread: float = 0.02,
    kind: str = "adapter",
) -> Path:
    """Writes an adapter of the given rank for these matrices, and returns its path."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(seed)
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, (outputs, inputs) in shapes.items():
        for suffix, sizes in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank))):
            writer.add_tensor(f"{name}.{suffix}", rng.normal(0, spread, sizes).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
