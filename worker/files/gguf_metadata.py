"""Reads the metadata of a GGUF file without reading the weights, quickly even for vocabularies of 150,000 tokens.

A file has a header (magic, version, number of tensors, number of keys), the keys with their values, the table of
tensors, and the weights. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian.

Anybody's file may be read, so nothing is taken for true: a long array that nobody asks for is skipped, and a header
that would take long, or much memory, is refused. Bytes are read and not mapped, since a file that is cut short
meanwhile would end the process.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.regular import open_regular

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
_TOKENS = "tokenizer.ggml.tokens"
_VOCABULARY = (_TOKENS, "tokenizer.ggml.merges", "tokenizer.ggml.scores")
"""The long arrays that are kept."""
_MAX_KEYS = 100_000
_MAX_TENSORS = 100_000
_MAX_KEPT = 65_536
"""The most values of another array that are kept: some have one for each layer."""
_MAX_TEXTS = 2_000_000
"""The most texts in an array: a vocabulary of 262,000 tokens has 515,000 merges."""
_HEAD_BYTES = (2 << 20, 16 << 20, 128 << 20)
"""The bytes that are read at first, and what follows if these do not suffice. No model has a quarter of the last."""
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SAMPLES = 64
SAMPLE_BYTES = 4_096
"""The length of each sample of which a fingerprint is made."""


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
    lengths: dict[str, int] = {}  # never changed
    """The lengths of all arrays, also of those whose values are not kept."""

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def number(self, key: str) -> int:
        """Returns a positive integer, or 0."""
        value = self.values.get(key)
        return value if isinstance(value, int) and value > 0 else 0

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
        return {text: token_id for token_id, text in enumerate(self.texts(_TOKENS))}

    @property
    def vocab_size(self) -> int:
        """The number of tokens; 0 if the file has no vocabulary."""
        return self.lengths.get(_TOKENS, 0)


def read(path: Path) -> Metadata:
    """Raises ModelError, saying what to do, for a file that is missing, truncated or not GGUF."""
    return _read(path, lambda reader: reader.metadata(_VOCABULARY))


def read_sizes(path: Path) -> Metadata:
    """Does the same as `read` without the texts of the vocabulary."""
    return _read(path, lambda reader: reader.metadata())


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a file by name. Raises ModelError like `read`."""
    return _read(path, lambda reader: reader.tensors())


def parse(path: Path, data: bytes) -> Metadata:
    """Does the same as `read` for the contents of a file."""
    return _parse(path, _Bytes.of(data), lambda reader: reader.metadata(_VOCABULARY))


def parse_tensors(path: Path, data: bytes) -> dict[str, TensorInfo]:
    """Does the same as `read_tensors` for the contents of a file."""
    return _parse(path, _Bytes.of(data), lambda reader: reader.tensors())


def sample_starts(begin: int, size: int) -> list[int]:
    """Returns where the samples begin of which the fingerprint of a file of `size` bytes is made, besides its metadata,
    which ends at `begin`."""
    return [begin + (size - begin) * sample // _SAMPLES for sample in range(_SAMPLES)]


def check(path: Path) -> None:
    """Raises ModelError if there is no GGUF file."""
    _read(path, lambda _: None)


class _Bytes(NamedTuple):
    """The bytes of a file."""

    size: int
    read: Callable[[int, int], bytes]
    """Returns as many bytes from an offset on, fewer at the end."""

    @classmethod
    def of(cls, data: bytes) -> "_Bytes":
        return cls(len(data), lambda start, count: data[start : start + count])


def _read(path: Path, parse: Callable[["_Reader"], ReadT]) -> ReadT:
    try:
        fd = open_regular(path)
    except ModelError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            problem = "there is no such file; name a GGUF file, or a model on the Hub as org/repo"
        elif os.path.isdir(path):  # which, unlike Path, raises nothing
            problem = "is a directory; name a GGUF file"
        else:
            raise
        raise ModelError(f"{path}: {problem}") from error
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise ModelError(f"{path}: can't be read: it is empty")
        return _parse(path, _Bytes(size, lambda start, count: os.pread(fd, count, start)), parse)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _parse(path: Path, data: _Bytes, parse: Callable[["_Reader"], ReadT]) -> ReadT:
    for most in _HEAD_BYTES:
        head = data.read(0, most)
        if head[: len(_MAGIC)] != _MAGIC:
            raise ModelError(f"{path}: not a GGUF file; convert the model to GGUF first")
        try:
            return parse(_Reader(data, head))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        except (struct.error, UnicodeDecodeError, _CorruptError) as error:
            # what has not been read may be what is missing
            if len(head) < most or not isinstance(error, struct.error):
                problem = f"the GGUF header is corrupt or cut short ({error})"
                raise ModelError(f"{path}: {problem}; fetch the file again") from error
    raise ModelError(f"{path}: its header has more than {_HEAD_BYTES[-1] >> 20} MiB, which no model has")


class _CorruptError(Exception):
    """The file has a value that no writer of GGUF would write."""


class _Reader:
    """Reads values one after another from the beginning of a file. Lengths are checked before they are used, since any
    file may be passed. Raises struct.error at the end of what was read."""

    def __init__(self, data: _Bytes, head: bytes) -> None:
        self._data = data
        self._head = head
        self._at = len(_MAGIC)
        self._lengths: dict[str, int] = {}

    def tensors(self) -> dict[str, TensorInfo]:
        found = {}
        metadata = self.metadata()
        if metadata.num_tensors > _MAX_TENSORS:
            raise _CorruptError(f"{metadata.num_tensors} tensors")
        for _ in range(metadata.num_tensors):
            name = self._string()
            num_dimensions = self._unpack(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise _CorruptError(f"a tensor of {num_dimensions} dimensions")
            shape = tuple(self._unpack(_U64) for _ in range(num_dimensions))
            found[name] = TensorInfo(shape, self._unpack(_U32), self._unpack(_U64))
        # The offsets in the table count from its end, rounded up to the alignment.
        alignment = metadata.values.get("general.alignment") or _DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment < 0 or alignment & (alignment - 1):
            raise _CorruptError(f"an alignment of {alignment}")
        begin = -(-self._at // alignment) * alignment
        return {name: one._replace(start=begin + one.start) for name, one in found.items()}

    def metadata(self, vocabulary: tuple[str, ...] = ()) -> Metadata:
        """Reads all values but those of long arrays, except the named ones."""
        self._check_version(self._unpack(_U32))
        num_tensors = self._unpack(_U64)
        num_keys = self._unpack(_U64)
        if num_keys > _MAX_KEYS:
            raise _CorruptError(f"{num_keys} keys")
        values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string()
            kind = self._unpack(_U32)
            value = self._array(key, key in vocabulary) if kind == _ARRAY else self._value(kind)
            if value is not None:
                values[key] = value
        return Metadata(values, self._fingerprint(), num_tensors, self._lengths)

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
        size = self._data.size
        digest = xxhash.xxh3_64(_U64.pack(size))
        digest.update(self._head[: self._at])
        for start in sample_starts(self._at, size):
            digest.update(self._data.read(start, SAMPLE_BYTES))
        return digest.hexdigest()

    def _take(self, count: int) -> int:
        """Passes over bytes; returns where they begin."""
        start, self._at = self._at, self._at + count
        if self._at > self._data.size:
            raise _CorruptError(f"{count} bytes where {self._data.size - start} are left")
        if self._at > len(self._head):
            raise struct.error(f"{count} bytes at {start}")
        return start

    def _unpack(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._head, self._at)
        self._at += form.size
        assert isinstance(value, int)
        return value

    def _string(self) -> str:
        start = self._take(self._unpack(_U64))
        return self._head[start : self._at].decode()

    def _value(self, kind: int) -> Value:
        return self._string() if kind == _STRING else self._scalars(kind, 1)[0]

    def _array(self, key: str, is_wanted: bool) -> Value | None:
        kind, count = self._unpack(_U32), self._unpack(_U64)
        if count > self._data.size:  # every value takes at least a byte
            raise _CorruptError(f"an array of {count} values")
        if count > _MAX_TEXTS and (kind == _STRING or is_wanted):
            raise ModelError(f"its array {key} has {count:,} values, and no model has more than {_MAX_TEXTS:,}")
        self._lengths[key] = count
        is_kept = is_wanted or (count <= _MAX_KEPT and key not in _VOCABULARY)
        if kind == _STRING:
            return self._strings(count, is_kept=is_kept)
        if is_kept:
            return self._scalars(kind, count)
        self._take(count * struct.calcsize(_form(kind)))
        return None

    def _strings(self, count: int, *, is_kept: bool) -> list[str] | None:
        """Reads strings in one loop, without a call for each: a vocabulary and its merges have half a million."""
        head, end, at = self._head, len(self._head), self._at
        texts: list[str] = []
        for _ in range(count):
            (length,) = _U64.unpack_from(head, at)
            start, at = at + 8, at + 8 + length
            if at > end:
                self._at = start
                self._take(length)
            if is_kept:
                texts.append(head[start:at].decode())
        self._take(at - self._at)
        return texts if is_kept else None

    def _scalars(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        form = _form(kind)
        start = self._take(count * struct.calcsize(form))
        return list(struct.unpack_from(f"<{count}{form[1]}", self._head, start))


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise _CorruptError(f"a value of type {kind}")
    return f"<{_SCALARS[kind]}"
