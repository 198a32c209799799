"""Writes the demo model with a mistake in its metadata."""

import math
import struct
from pathlib import Path

from tokenbus import demo

NO_BLOCKS = ("llama.block_count", struct.pack("<I", 0))
TOO_MANY_BLOCKS = ("llama.block_count", struct.pack("<I", 1_000))
NEGATIVE = ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1.0))
NAN = ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", math.nan))


def with_value(path: Path, key: str, value: bytes) -> Path:
    """Writes the demo model to `path` with another value of the same size."""
    data = bytearray(demo.MODEL_PATH.read_bytes())
    at = _behind(data, key)
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def with_template(path: Path, template: str) -> Path:
    """Writes the demo model to `path` with another chat template, which must not be longer."""
    data = bytearray(demo.MODEL_PATH.read_bytes())
    at = _behind(data, "tokenizer.chat_template")
    (length,) = struct.unpack_from("<Q", data, at)
    assert len(template) <= length
    data[at + 8 : at + 8 + length] = template.encode().ljust(length)
    path.write_bytes(data)
    return path


def _behind(data: bytearray, key: str) -> int:
    """Returns the offset of a key's value, which follows the key's name and the value's type."""
    name = struct.pack("<Q", len(key)) + key.encode()
    return data.index(name) + len(name) + 4
