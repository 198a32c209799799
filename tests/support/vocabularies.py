"""GGUF files with a vocabulary and no weights: written for a test, or those that llama.cpp's own tests use."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llama_cpp import llama_cpp as llama

from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.tokenizers.gguf_tokenizer import GgufTokenizer

_SCALARS = {str: 8, bool: 7, int: 4, float: 6}
_ITEMS = _SCALARS | {int: 5}
"""llama.cpp reads single integers as unsigned, and those in arrays as signed."""
_CODES = {bool: "?", int: "i", float: "f"}
Scalar = str | bool | int | float
Entry = Scalar | list[str] | list[int] | list[float]


class Loaded(NamedTuple):
    metadata: gguf_metadata.Metadata
    tokenizer: GgufTokenizer


@contextmanager
def load(path: Path) -> Iterator[Loaded]:
    """Loads a vocabulary into llama.cpp, without a model."""
    backend.init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None, backend.last_error()
    found = gguf_metadata.read(path)
    yield Loaded(found, GgufTokenizer(llama.llama_model_get_vocab(model), found))
    llama.llama_model_free(model)


def write(path: Path, entries: dict[str, Entry]) -> Path:
    """Writes a file. The keys of `entries` are those after `tokenizer.ggml.`."""
    pairs = {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    body = b"".join(_string(key) + _value(value) for key, value in pairs.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body)
    return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Entry) -> bytes:
    if isinstance(value, list):
        kind = type(value[0])
        return struct.pack("<IIQ", 9, _ITEMS[kind], len(value)) + b"".join(map(_scalar, value))
    return struct.pack("<I", _SCALARS[type(value)]) + _scalar(value)


def _scalar(value: Scalar) -> bytes:
    return _string(value) if isinstance(value, str) else struct.pack(f"<{_CODES[type(value)]}", value)
