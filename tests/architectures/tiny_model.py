"""Writes a tiny random model of any architecture that the built llama.cpp knows.

    python -m tests.architectures.tiny_model ARCHITECTURE OUT.gguf

llama.cpp itself says which tensors a model has: it is given the metadata alone, and creates what it would load."""

import argparse
import ctypes
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from tests.architectures import hyperparameters
from tests.architectures.hyperparameters import VOCABULARY, Value
from tests.support.models import random_model, random_vocabulary
from tokenbus.worker.engine.gguf import backend

_LIBRARY = Path(llama.__file__).parent / "lib" / "libggml-base.so"
_MAX_DIMENSIONS = 4


class UnwritableError(Exception):
    """llama.cpp makes no model of such hyperparameters; the message is its reason."""


class Tensor(NamedTuple):
    """A tensor's name, and its shape with the dimension first that llama.cpp has last."""

    name: str
    shape: tuple[int, ...]


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _TensorHead(ctypes.Structure):
    """The beginning of ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("sizes", ctypes.c_int64 * _MAX_DIMENSIONS))


def write(path: Path, architecture: str, *, seed: int = 0) -> None:
    """Writes the model; the same arguments give the same bytes. Raises UnwritableError; llama.cpp may end the process
    for hyperparameters that it does not expect."""
    metadata = path.with_suffix(".metadata")
    try:
        _write(metadata, architecture, [], seed)
        found = tensors(metadata)
    finally:
        metadata.unlink(missing_ok=True)
    _write(path, architecture, found, seed)


def tensors(metadata: Path) -> list[Tensor]:
    """Returns the tensors of the model whose metadata a file holds. Raises UnwritableError."""
    ggml = ctypes.CDLL(str(_LIBRARY))
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = (ctypes.c_char_p, _InitParams)
    ggml.gguf_free.argtypes = (ctypes.c_void_p,)
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_get_name.argtypes = (ctypes.c_void_p,)
    found: dict[str, Tensor] = {}

    def create(tensor: int, _: int) -> None:
        name = ggml.ggml_get_name(tensor).decode()
        sizes = list(_TensorHead.from_address(tensor).sizes)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        found[name] = Tensor(name, tuple(reversed(sizes)))

    backend.init()
    handle = ggml.gguf_init_from_file(str(metadata).encode(), _InitParams(True, None))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_init_from_user(handle, llama.llama_model_set_tensor_data_t(create), None, params)
    ggml.gguf_free(handle)
    if model is None:
        raise UnwritableError(backend.last_error())
    llama.llama_model_free(model)
    return list(found.values())


def _write(path: Path, architecture: str, found: list[Tensor], seed: int) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tokenbus random")  # llama.cpp treats some names of models in a special way
    for key, value in hyperparameters.of(architecture).items():
        _add(writer, key if key.startswith("xielu.") else f"{architecture}.{key}", value)
    random_model.add_vocabulary(writer, random_vocabulary.build(VOCABULARY))
    for tensor in found:
        writer.add_tensor(tensor.name, _weights(tensor, seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add[type(value)](key, value)


def _weights(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    """Returns weights that keep activations near 1, as they are before any training."""
    rng = random_model.generator(zlib.crc32(tensor.name.encode()) + seed)
    drawn = rng.standard_normal(tensor.shape, np.float32)
    if tensor.name.endswith("ssm_a"):
        return -np.abs(drawn) - np.float32(0.1)
    if "norm" in tensor.name and tensor.name.endswith("weight"):
        return np.ones(tensor.shape, np.float32)
    if len(tensor.shape) == 1:
        return drawn * np.float32(0.1)
    return drawn * np.float32(1 / math.sqrt(tensor.shape[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures.tiny_model", allow_abbrev=False)
    parser.add_argument("architecture")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    options = parser.parse_args()
    write(options.out, options.architecture)


if __name__ == "__main__":
    main()
