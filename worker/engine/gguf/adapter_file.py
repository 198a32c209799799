"""Checks a LoRA adapter against the model that it is for.

llama.cpp checks less, and aborts the process in the first step with an adapter that it can't compute. So anything that
could cause that is refused here: matrices whose shape, number of dimensions or type its graphs do not expect."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.device import non_finite
from tokenbus.worker.files import gguf_metadata, number_types
from tokenbus.worker.files.gguf_metadata import Metadata, TensorInfo
from tokenbus.worker.files.regular import MAX_ADAPTER_BYTES, read_regular

_A, _B = ".lora_a", ".lora_b"
_TYPES = {kind.ggml: kind for kind in (number_types.F32, number_types.F16, number_types.Q8_0, number_types.BF16)}
_EMBEDDING = "token_embd.weight"
_MAX_RANK = 1_024


class _Pair(NamedTuple):
    """The two matrices whose product `b @ a` is added to one of the model's."""

    a: TensorInfo
    b: TensorInfo


class GgufAdapterFile(NamedTuple):
    """The contents of a file that is an adapter for the model."""

    digest: str
    """The name by which the adapter is known everywhere."""
    data: bytes


def read(path: Path, architecture: str, base: Mapping[str, TensorInfo]) -> GgufAdapterFile:
    """Reads a file once, since it may be replaced at any time. Raises ModelError, naming the problem, unless it is a
    LoRA adapter for the model with these tensors."""
    if path.is_dir():
        raise ModelError(f"{path}: is a folder, as PEFT writes it; convert it with convert_lora_to_gguf")
    data = read_regular(path, MAX_ADAPTER_BYTES)
    check(path, data, architecture, base)
    return GgufAdapterFile(hashlib.blake2b(data, digest_size=16).hexdigest(), data)


def check(path: Path, data: bytes, architecture: str, base: Mapping[str, TensorInfo]) -> None:
    """Raises ModelError unless a file's contents are an adapter for the model."""
    _check_kind(path, gguf_metadata.parse(path, data), architecture)
    try:
        for name, pair in _pairs(gguf_metadata.parse_tensors(path, data)).items():
            _check_pair(name, pair, base)
            for tensor, suffix in zip(pair, (_A, _B), strict=True):
                _check_numbers(name + suffix, tensor, data)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _check_kind(path: Path, found: Metadata, architecture: str) -> None:
    kind, own = found.text("general.type"), found.text("general.architecture")
    if kind != "adapter" or found.text("adapter.type") != "lora":
        raise ModelError(
            f"{path}: is not a LoRA adapter (general.type is {kind!r}); convert one with convert_lora_to_gguf"
        )
    if own != architecture:
        raise ModelError(f"{path}: is an adapter for the architecture {own!r}, and the model is a {architecture!r}")
    alpha = found.values.get("adapter.lora.alpha")
    if isinstance(alpha, float) and not math.isfinite(alpha):
        raise ModelError(f"{path}: adapter.lora.alpha is {alpha}; it must be finite")
    if "adapter.alora.invocation_tokens" in found.values:
        raise ModelError(f"{path}: is an adapter that acts only after its invocation tokens, which is not supported")


def _pairs(tensors: Mapping[str, TensorInfo]) -> Mapping[str, _Pair]:
    """Returns the matrices of an adapter by the name of the model's tensor. Raises ValueError."""
    names = {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    for name in names:
        for given in (name + _A, name + _B):
            if given not in tensors:
                raise ValueError(f"the adapter has no {given}")
    if len(tensors) != 2 * len(names):
        raise ValueError("the adapter has tensors that are neither lora_a nor lora_b")
    if not names:
        raise ValueError("the adapter has no matrices")
    return {name: _Pair(tensors[name + _A], tensors[name + _B]) for name in sorted(names)}


def _check_pair(name: str, pair: _Pair, base: Mapping[str, TensorInfo]) -> None:
    """Raises ValueError for matrices that can't be added to the model's. Shapes are (inputs, outputs), as in files."""
    if name not in base or name == _EMBEDDING:
        problem = "can't be changed by an adapter" if name in base else "is not a tensor of the model"
        raise ValueError(f"{name} {problem}: is it an adapter for another base?")
    shape, (a, b) = base[name].shape, pair
    if len(shape) < 2:
        raise ValueError(f"{name} is not a matrix")
    rank = a.shape[1] if len(a.shape) > 1 else 0
    if not 1 <= rank <= _MAX_RANK:
        raise ValueError(f"{name} has the rank {rank}; it must be 1 to {_MAX_RANK}")
    if _padded(a.shape) != _padded((shape[0], rank, *shape[2:])) or _padded(b.shape) != _padded((rank, *shape[1:])):
        problem = f"{name} has matrices of {a.shape} and {b.shape} for one of {shape}"
        raise ValueError(f"{problem}: the ranks differ, or it is an adapter for another base")
    for tensor in pair:
        if tensor.type not in _TYPES:
            allowed = ", ".join(kind.name.upper() for kind in _TYPES.values())
            raise ValueError(f"{name} has the type {tensor.type}; it must be one of {allowed}")


def _check_numbers(name: str, tensor: TensorInfo, data: bytes) -> None:
    """Raises ValueError for a matrix that is truncated or contains NaN or infinity."""
    kind = _TYPES[tensor.type]
    values = memoryview(data)[tensor.start : tensor.start + kind.num_bytes(math.prod(tensor.shape))]
    if len(values) < kind.num_bytes(math.prod(tensor.shape)):
        raise ValueError("is corrupt or cut short; fetch the file again")
    if not non_finite.all_finite(values, kind):
        raise ValueError(f"{name} has values that are not finite (NaN or infinity): train or convert the adapter again")


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without trailing ones, which change nothing."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
