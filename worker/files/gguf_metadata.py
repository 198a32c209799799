"""Reads the metadata of a GGUF file without reading the weights, quickly even for vocabularies of 150,000 tokens.

A file has a header (magic, version, number of tensors, number of keys), the keys with their values, the table of
tensors, and the weights. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from tokenbus.worker.contract.engine_errors import ModelError

ReadT = TypeVar("ReadT")
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_MAX_KEYS = 100_000


_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """A row of the table of tensors."""

    shape: tuple[int, ...]
    """The lengths of its dimensions, the innermost first: (inputs, outputs) for a matrix."""
    type: int
    """GGUF's number for its data type."""
    start: int = 0
    """The offset of its values in the file."""


class Metadata(NamedTuple):
    """The values of a file by key. The getters return nothing for a key that is missing or of another type."""

    values: dict[str, Value]
    fingerprint: str
    """A hash of the file's size, its metadata, and samples of the rest."""
    num_tensors: int = 0
    """The tensors of this file; a split model has more in its other files."""

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def number(self, key: str) -> int:
        """Returns an integer, or 0."""
        value = self.values.get(key)
        return value if isinstance(value, int) else 0

    def numbers(self, key: str) -> list[float]:
        value = self.values.get(key)
        return [item for item in value if isinstance(item, int | float)] if isinstance(value, list) else []

    def ints(self, key: str) -> list[int]:
        return [item for item in self.numbers(key) if isinstance(item, int)]

    def sampling_defaults(self) -> dict[str, float]:
        """Returns the sampling parameters that the file recommends, under their names on the wire."""
        found = {}
        for key, name in _SAMPLING.items():
            value = self.values.get(f"general.sampling.{key}")
            if isinstance(value, int | float):
                found[name] = value
        return found

    def vocabulary(self) -> dict[str, int]:
        """Returns the ids of the tokens by their texts."""
        return {text: token_id for token_id, text in enumerate(self.texts("tokenizer.ggml.tokens"))}


def read(path: Path) -> Metadata:
    """Raises ModelError, saying what to do, for a file that is missing, truncated or not GGUF."""
    return _read(path, lambda reader: reader.metadata())


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a file by name. Raises ModelError like `read`."""
    return _read(path, lambda reader: reader.tensors())


def parse(path: Path, data: bytes) -> Metadata:
    """Does the same as `read` for the contents of a file."""
    return _parse(path, data, lambda reader: reader.metadata())


def parse_tensors(path: Path, data: bytes) -> dict[str, TensorInfo]:
    """Does the same as `read_tensors` for the contents of a file."""
    return _parse(path, data, lambda reader: reader.tensors())


def check(path: Path) -> None:
    """Raises ModelError if there is no GGUF file."""
    _read(path, lambda _: None)


def _read(path: Path, parse: Callable[["_Reader"], ReadT]) -> ReadT:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, parse)
    except FileNotFoundError as error:
        raise ModelError(
            f"{path}: there is no such file; name a GGUF file, or a model on the Hub as org/repo"
        ) from error
    except IsADirectoryError as error:
        raise ModelError(f"{path}: is a directory; name a GGUF file") from error
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: can't be read: {error}") from error


def _parse(path: Path, data: mmap.mmap | bytes, parse: Callable[["_Reader"], ReadT]) -> ReadT:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file; convert the model to GGUF first")
    try:
        return parse(_Reader(data))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (struct.error, IndexError, UnicodeDecodeError, _CorruptError) as error:
        raise ModelError(f"{path}: the GGUF header is corrupt or cut short ({error}); fetch the file again") from error


class _CorruptError(Exception):
    """The file has a value that no writer of GGUF would write."""


class _Reader:
    """Reads values one after another. Lengths are checked before they are used, since any file may be passed."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def tensors(self) -> dict[str, TensorInfo]:
        found = {}
        metadata = self.metadata()
        for _ in range(metadata.num_tensors):
            name = self._string()
            num_dimensions = self._unpack(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise _CorruptError(f"a tensor of {num_dimensions} dimensions")
            shape = tuple(self._unpack(_U64) for _ in range(num_dimensions))
            found[name] = TensorInfo(shape, self._unpack(_U32), self._unpack(_U64))
        # The offsets in the table count from its end, rounded up to the alignment.
        alignment = metadata.number("general.alignment") or _DEFAULT_ALIGNMENT
        begin = -(-self._at // alignment) * alignment
        return {name: one._replace(start=begin + one.start) for name, one in found.items()}

    def metadata(self) -> Metadata:
        self._check_version(self._unpack(_U32))
        num_tensors = self._unpack(_U64)
        num_keys = self._unpack(_U64)
        if num_keys > _MAX_KEYS:
            raise _CorruptError(f"{num_keys} keys")
        values = {}
        for _ in range(num_keys):
            key = self._string()
            values[key] = self._value(self._unpack(_U32))
        return Metadata(values, self._fingerprint(), num_tensors)

    def _check_version(self, version: int) -> None:
        if version == 1:
            raise ModelError("is a GGUF file of version 1, which llama.cpp no longer reads; fetch or convert it again")
        if version >> 24:  # a small number in the other byte order
            raise ModelError(
                "is a big-endian GGUF file, which only big-endian machines read; fetch the little-endian one"
            )
        if version not in _VERSIONS:
            raise _CorruptError(f"version {version} is not one of {_VERSIONS}")

    def _fingerprint(self) -> str:
        """Hashes 64 samples of tensor table and weights, which takes a few ms regardless of the file's size."""
        size = len(self._data)
        digest = xxhash.xxh3_64(_U64.pack(size))
        digest.update(self._data[: self._at])
        for sample in range(64):
            start = self._at + (size - self._at) * sample // 64
            digest.update(self._data[start : start + 4096])
        return digest.hexdigest()

    def _unpack(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        assert isinstance(value, int)
        return value

    def _string(self) -> str:
        length = self._unpack(_U64)
        if length > len(self._data) - self._at:
            raise _CorruptError(f"a string of {length} bytes")
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> Value:
        kind, count = self._unpack(_U32), self._unpack(_U64)
        if count > len(self._data):  # every value takes at least a byte
            raise _CorruptError(f"an array of {count} values")
        if kind == _STRING:
            return self._strings(count)
        return self._scalars(kind, count)

    def _strings(self, count: int) -> list[str]:
        """Reads strings in one loop, without a call for each: a vocabulary and its merges have half a million."""
        data, size, at = self._data, len(self._data), self._at
        texts = []
        for _ in range(count):
            (length,) = _U64.unpack_from(data, at)
            start, at = at + 8, at + 8 + length
            if at > size:
                raise _CorruptError(f"a string of {length} bytes")
            texts.append(data[start:at].decode())
        self._at = at
        return texts

    def _scalars(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        if kind not in _SCALARS:
            raise _CorruptError(f"a value of type {kind}")
        form = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(form, self._data, self._at))
        self._at += struct.calcsize(form)
        return values
