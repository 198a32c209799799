"""Reads safetensors files: 8 bytes with the header's length, a JSON object, and the tensors' bytes.

Headers are not trusted: offsets, sizes and types are checked against each other and the file. Format:
https://huggingface.co/docs/safetensors"""

import io
import math
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.regular import open_regular

Array = npt.NDArray[Any]
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 32 << 20
"""That of a model with 90,000 tensors has 10 MB."""
_MAX_DIMENSIONS = 8
_COUNTED = "embeddings.position_ids"
"""Ends the name of a tensor that has the numbers from 0 on: older files of encoders have it beside the weights."""
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""NumPy has no bfloat16: its values are kept as the upper halves of float32."""
_MATRIX = re.compile(rb'"dtype"\s*:\s*"(\w+)"\s*,\s*"shape"\s*:\s*\[\s*\d+\s*,')


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Tensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: str
    """F32, F16 or BF16."""
    shape: tuple[int, ...]
    start: int
    """The offset of its bytes in the file."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def rows(self) -> Array:
        """Returns the tensor as a memory-mapped matrix, a vector as one column. BF16 is returned as integers."""
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        shape = (self.size // columns, columns)
        mapped: Array = np.memmap(self.path, dtype=_DTYPES[self.dtype], mode="r", offset=self.start, shape=shape)
        return mapped


def read(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Returns the tensors of all files by name. Raises ModelError for inconsistent files."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in _read_file(path).items():
            if name in tensors:
                raise ModelError(f"{path}: {name} is in {tensors[name].path.name} too; fetch the files again")
            tensors[name] = tensor
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    with os.fdopen(open_regular(path), "rb") as file:
        return _read_table(path, file, os.fstat(file.fileno()).st_size)


def matrix_types(paths: Iterable[Path]) -> set[str]:
    """Returns the types of the matrices in all files, as the headers write them. They are searched, not parsed, so this
    takes no memory to speak of for anybody's file. Raises ModelError."""
    found = set()
    for path in paths:
        with os.fdopen(open_regular(path), "rb") as file:
            header = _read_header(path, file, os.fstat(file.fileno()).st_size)
        found |= {match[1].decode() for match in _MATRIX.finditer(header)}
    return found


def parse(path: Path, data: bytes) -> dict[str, Array]:
    """Returns the tensors in a file's contents by name, in float32. Raises ModelError if they are inconsistent."""
    found = {}
    for name, tensor in _read_table(path, io.BytesIO(data), len(data)).items():
        raw = np.frombuffer(data, _DTYPES[tensor.dtype], tensor.size, tensor.start).reshape(tensor.shape)
        found[name] = to_float32(raw, tensor.dtype)
    return found


def to_float32(values: Array, dtype: str) -> Array:
    """Converts a file's raw values."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _read_header(path: Path, file: BinaryIO, size: int) -> bytes:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        most = f"in {size:,}" if length > size else f"in the {_MAX_HEADER_BYTES >> 20} MiB that one may have"
        raise _lies(path, f"a header of {length:,} bytes does not fit {most}")
    return file.read(length)


def _read_table(path: Path, file: BinaryIO, size: int) -> dict[str, Tensor]:
    header = _read_header(path, file, size)
    try:
        document = msgspec.json.decode(header, type=dict[str, Any])
        document.pop("__metadata__", None)
        entries = msgspec.convert(document, dict[str, _Entry])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _lies(path, f"its header can't be read ({error})") from error
    begin = _LENGTH.size + len(header)
    _check_overlaps(path, entries, size - begin)
    return {name: _checked(path, name, entry, begin) for name, entry in entries.items() if not name.endswith(_COUNTED)}


def _check_overlaps(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    """Checks that the tensors are contiguous and fill the file."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        if first != at or last < first or last > data_bytes:
            raise _lies(path, f"{name} is said to lie at {first:,} to {last:,} of {data_bytes:,}, not from {at:,} on")
        at = last
    if at != data_bytes:
        raise _lies(path, f"its tensors end at {at:,}, its bytes at {data_bytes:,}")


def _checked(path: Path, name: str, entry: _Entry, begin: int) -> Tensor:
    if entry.dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ModelError(
            f"{path}: {name} is of type {entry.dtype}; only {known} can be converted here: fetch unquantized weights, "
            "or a GGUF of the model"
        )
    first, last = entry.data_offsets
    if len(entry.shape) > _MAX_DIMENSIONS or any(count < 1 for count in entry.shape):
        raise _lies(path, f"{name} has the shape {entry.shape}")
    needed = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
    if needed != last - first:
        raise _lies(
            path, f"{name} of shape {entry.shape} and type {entry.dtype} needs {needed:,} bytes, not {last - first:,}"
        )
    return Tensor(path, entry.dtype, tuple(entry.shape), begin + first)


def _lies(path: Path, problem: str) -> ModelError:
    return ModelError(f"{path}: is corrupt or cut short: {problem}; fetch the file again")
