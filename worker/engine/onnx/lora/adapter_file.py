"""Reads LoRA adapters for an ONNX model and checks them against its projections: PEFT folders, and GGUF files."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.onnx.lora import gguf_adapter, peft_adapter
from tokenbus.worker.engine.onnx.lora.base import MAX_RANK, Base
from tokenbus.worker.engine.onnx.lora.matrices import Change
from tokenbus.worker.engine.onnx.lora.projections import Place

_GGUF = b"GGUF"


class OnnxAdapterFile(NamedTuple):
    """The contents of a file that is an adapter for the model."""

    digest: str
    """The name by which the adapter is known everywhere."""
    changes: Mapping[Place, Change]


def read(path: Path, base: Base) -> OnnxAdapterFile:
    """Reads each file once, since it may be replaced at any time. Raises ModelError, naming the problem, unless they
    are a LoRA adapter for the model."""
    weights = path / peft_adapter.WEIGHTS if path.is_dir() else path
    data = _contents(weights)
    if data[: len(_GGUF)] == _GGUF:
        return OnnxAdapterFile(_digest(data), _checked(path, gguf_adapter.changes(path, data, base)))
    if weights.suffix != peft_adapter.SUFFIX:
        raise ModelError(f"{path}: is not a LoRA adapter; pass a PEFT folder with {peft_adapter.WEIGHTS}, or a GGUF")
    config = _contents(weights.with_name(peft_adapter.CONFIG))
    changes = peft_adapter.changes(weights, data, config)
    _check(path, changes, base)
    return OnnxAdapterFile(_digest(data, config), _checked(path, changes))


def _checked(path: Path, changes: Mapping[Place, Change]) -> Mapping[Place, Change]:
    """Raises ModelError for matrices whose values are not finite, before or after they are scaled."""
    for place, change in changes.items():
        for name, matrix in zip("AB", change, strict=True):
            if not np.isfinite(matrix).all():
                raise ModelError(
                    f"{path}: lora_{name} of layer {place.layer}'s {place.name} has values that are not finite (NaN or "
                    "infinity): train or convert the adapter again"
                )
    return changes


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error


def _digest(data: bytes, config: bytes = b"") -> str:
    """Returns, for a GGUF, the same digest as the GGUF engine does."""
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(config)
    return digest.hexdigest()


def _check(path: Path, changes: Mapping[Place, Change], base: Base) -> None:
    """Raises ModelError for matrices that can't be added to the projections."""
    if not changes:
        raise ModelError(f"{path}: the adapter has no matrices")
    for place, (a, b) in changes.items():
        name = f"layer {place.layer}'s {place.name}"
        if place not in base.sizes:
            raise ModelError(f"{path}: {name} is not a projection of the graph: is it an adapter for another base?")
        inputs, outputs = base.sizes[place]
        if not 1 <= len(a) <= MAX_RANK:
            raise ModelError(f"{path}: {name} has the rank {len(a)}; it must be 1 to {MAX_RANK}")
        if a.shape != (len(a), inputs) or b.shape != (outputs, len(a)):
            raise ModelError(
                f"{path}: {name} has matrices of {a.shape} and {b.shape} for {inputs} inputs and {outputs} outputs: "
                "the ranks differ, or it is an adapter for another base"
            )
