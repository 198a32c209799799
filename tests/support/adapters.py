"""Writes LoRA adapters with random weights for the demo model, in llama.cpp's format and in PEFT's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support import safetensors_model
from tests.support.models import random_adapter

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


PEFT_SHAPES: Mapping[str, tuple[int, int]] = {
    f"layers.{layer}.{name}": shape
    for layer in range(4)
    for name, shape in (
        ("self_attn.q_proj", (128, 128)),
        ("self_attn.k_proj", (64, 128)),
        ("self_attn.v_proj", (64, 128)),
        ("self_attn.o_proj", (128, 128)),
        ("mlp.gate_proj", (384, 128)),
        ("mlp.up_proj", (384, 128)),
        ("mlp.down_proj", (128, 384)),
    )
}
"""The projections of the demo model: their outputs and inputs."""


def peft_tensors(
    seed: int = 1, *, rank: int = 4, shapes: Mapping[str, tuple[int, int]] = PEFT_SHAPES, spread: float = 0.2
) -> dict[str, npt.NDArray[Any]]:
    """Returns random matrices under the names that PEFT gives them."""
    rng = np.random.default_rng(seed)
    return {
        f"base_model.model.model.{name}.lora_{part}.weight": rng.normal(0, spread, sizes).astype(np.float32)
        for name, (outputs, inputs) in shapes.items()
        for part, sizes in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }


def write_peft(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], **config: object) -> Path:
    """Writes an adapter as PEFT saves it, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_model.write(folder / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
