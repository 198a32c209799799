"""Writes LoRA adapters with random weights for GGUF models."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

DEMO_SHAPES: Mapping[str, tuple[int, int]] = {
    f"blk.{layer}.{name}.weight": shape
    for layer in range(4)
    for name, shape in (("attn_q", (128, 128)), ("attn_v", (64, 128)), ("ffn_down", (128, 384)))
}
"""Some matrices of the demo model: their outputs and inputs."""


def write(
    path: Path,
    seed: int = 1,
    *,
    shapes: Mapping[str, tuple[int, int]] = DEMO_SHAPES,
    rank: int = 4,
    architecture: str = "llama",
    spread: float = 0.2,
    kind: str = "adapter",
) -> Path:
    """Writes an adapter of that rank for these matrices, and returns its path."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(seed)
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, (outputs, inputs) in shapes.items():
        for suffix, shape in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank))):
            writer.add_tensor(f"{name}.{suffix}", rng.normal(0, spread, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
