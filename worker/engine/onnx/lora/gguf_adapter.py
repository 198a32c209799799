"""Reads the matrices of an adapter in llama.cpp's format, so that workers of both formats can use the same file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import safetensors
from tokenbus.worker.convert.architectures import ARCHITECTURES, Architecture
from tokenbus.worker.engine.gguf import adapter_file
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.lora.base import Base
from tokenbus.worker.engine.onnx.lora.matrices import Change
from tokenbus.worker.engine.onnx.lora.projections import LLAMA_CPP_NAMES, Place
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.files.gguf_metadata import TensorInfo

_F32, _F16, _Q8_0, _BF16 = 0, 1, 8, 30
_BLOCK = 32
_DTYPES: Mapping[int, np.dtype[Any]] = {
    _F32: np.dtype("<f4"),
    _F16: np.dtype("<f2"),
    _BF16: np.dtype("<u2"),
    _Q8_0: np.dtype([("scale", "<f2"), ("integers", "i1", _BLOCK)]),
}
_ROTATED = ("q_proj", "k_proj")


def changes(path: Path, data: bytes, base: Base) -> Mapping[Place, Change]:
    """Raises ModelError, naming the problem, unless it is an adapter for the model."""
    architecture = _architecture(path, base)
    places = {f"blk.{layer}.{ours}.weight": Place(layer, name) for ours, layer, name in _named(base)}
    shapes = {name: TensorInfo(base.sizes[place], _F32) for name, place in places.items()}
    adapter_file.check(path, data, architecture.name, shapes)
    tensors = gguf_metadata.parse_tensors(path, data)
    alpha = gguf_metadata.parse(path, data).values.get("adapter.lora.alpha")
    found = {}
    for name, place in places.items():
        if f"{name}.lora_a" in tensors:
            a, b = (_values(path, data, tensors[f"{name}.{part}"]) for part in ("lora_a", "lora_b"))
            if architecture.rotates_neighbours and place.name in _ROTATED:
                b = _halves(b, base.head_width)
            scale = alpha / len(a) if isinstance(alpha, int | float) and alpha else 1.0
            found[place] = Change(a, b * np.float32(scale))
    return found


def _architecture(path: Path, base: Base) -> Architecture:
    for name, architecture in ARCHITECTURES.items():
        if name.lower().removesuffix("forcausallm") == base.architecture:
            return architecture
    known = ", ".join(ARCHITECTURES)
    raise ModelError(
        f"{path}: GGUF adapters can be used for {known} only, and by its config.json this is {base.architecture!r}: "
        "pass the PEFT folder that the adapter was converted from"
    )


def _named(base: Base) -> list[tuple[str, int, str]]:
    """Returns the projections with llama.cpp's names for them."""
    ours = {theirs: ours for ours, theirs in LLAMA_CPP_NAMES.items()}
    return [(ours[name], layer, name) for layer, name in base.sizes if name in ours]


def _values(path: Path, data: bytes, tensor: TensorInfo) -> Array:
    """Returns a matrix, of (rank, inputs) or (outputs, rank), in float32."""
    count = math.prod(tensor.shape)
    block, dtype = _BLOCK if tensor.type == _Q8_0 else 1, _DTYPES[tensor.type]
    if count % block or tensor.start + count // block * dtype.itemsize > len(data):
        raise ModelError(f"{path}: is corrupt or cut short; fetch the file again")
    raw = np.frombuffer(data, dtype, count // block, tensor.start)
    if tensor.type == _Q8_0:
        values = raw["integers"] * raw["scale"].astype(np.float32)[:, None]
    else:
        values = safetensors.to_float32(raw, "BF16" if tensor.type == _BF16 else "")
    rows: Array = values.reshape(tensor.shape[1], tensor.shape[0])
    return rows


def _halves(b: Array, head_width: int) -> Array:
    """Reorders the outputs of heads: llama.cpp rotates neighbours together, a graph the two halves."""
    split = b.reshape(-1, head_width // 2, 2, b.shape[1])
    reordered: Array = split.swapaxes(1, 2).reshape(b.shape)
    return reordered
