"""The quantizations of GGUF files: three are written directly, the others by llama.cpp's own quantizer."""

import ctypes
import os
from pathlib import Path

import gguf
from llama_cpp import llama_cpp as llama

from tests.support.models.shape import ImpossibleModelError, Shape, tensors
from tokenbus.worker.engine.gguf import backend

PLAIN = {
    "f32": (llama.LLAMA_FTYPE_ALL_F32, gguf.GGMLQuantizationType.F32),
    "f16": (llama.LLAMA_FTYPE_MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "bf16": (llama.LLAMA_FTYPE_MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
}
"""File type and matrix type of the formats that need no quantizer."""

# The same aliases as those of llama.cpp's tools/quantize.
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
# A file type that llama.h names and the quantizer can't write.
_UNWRITABLE = "nvfp4"
# These give some tensor a type that llama.cpp quantizes with an importance matrix only: `tensor_requires_imatrix` in
# src/llama-quant.cpp.
_WANTS_IMPORTANCES = frozenset(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"))
# A tensor whose rows are not whole blocks falls back to a type with smaller ones (`tensor_type_fallback` there), but
# for this one.
_BLOCK_WITHOUT_FALLBACK = {"q1_0": 128}
_BUFFER_BYTES = 64 << 20
"""Size of the quantizer's work buffer; llama.cpp's default is 8 GiB."""


def file_types() -> dict[str, int]:
    """Returns llama.cpp's number of each file type by name."""
    types = {
        name.removeprefix(prefix).lower(): value
        for prefix in ("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")
        for name, value in vars(llama).items()
        if name.startswith(prefix)
    }
    types.pop(_UNWRITABLE, None)
    return types | {alias: types[name] for alias, name in _ALIASES.items()}


def check(shape: Shape, quantization: str) -> None:
    """Raises ImpossibleModelError for an unknown name, and for rows that can't be split into its blocks."""
    if quantization not in (known := file_types()):
        raise ImpossibleModelError(f"quantization {quantization!r} is none of {', '.join(sorted(known))}")
    block = _BLOCK_WITHOUT_FALLBACK.get(quantization, 1)
    for name, columns in (("width", shape.width), ("feed_forward", shape.feed_forward)):
        if columns % block:
            raise ImpossibleModelError(f"{name} must be a multiple of {block} for {quantization}, got {columns}")


def quantize(plain: Path, quantized: Path, shape: Shape, quantization: str, threads: int) -> None:
    """Quantizes the F16 file `plain` into `quantized`; 0 threads means all cores."""
    backend.init()
    backend.last_error()
    params = llama.llama_model_quantize_default_params()
    params.ftype = file_types()[quantization]
    params.nthread = threads
    params.max_buf_size = _BUFFER_BYTES
    if quantization in _WANTS_IMPORTANCES:
        params.imatrix = _equal_importances(shape)
    if llama.llama_model_quantize(os.fsencode(plain), os.fsencode(quantized), ctypes.byref(params)) != 0:
        raise ImpossibleModelError(f"llama.cpp can't write {quantization}: {backend.last_error()}")


def _equal_importances(shape: Shape) -> ctypes.Array[llama.llama_model_imatrix_data]:
    """Returns an importance matrix with equal weights, ended by an entry without a name."""
    ones = (ctypes.c_float * max(shape.width, shape.feed_forward))()
    ones[:] = [1.0] * len(ones)
    matrices = [tensor for tensor in tensors(shape) if tensor.is_matrix]
    entries = (llama.llama_model_imatrix_data * (len(matrices) + 1))()
    for entry, tensor in zip(entries, matrices, strict=False):
        entry.name, entry.data, entry.size = tensor.name.encode(), ones, tensor.shape[-1]
    return entries
