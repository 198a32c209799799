"""Writes LoRA adapters with random weights for the demo model."""

from collections.abc import Mapping
from pathlib import Path

from bench.models import random_adapter

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
    architecture: str = "llama",
    kind: str = "adapter",
) -> Path:
    """Writes an adapter of rank 4 that changes every answer, and returns its path."""
    return random_adapter.write(path, seed, shapes, rank=4, architecture=architecture, spread=0.2, kind=kind)
