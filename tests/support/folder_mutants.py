"""Makes mutants of a folder with a model: each has one file with a mistake, which the seed chooses."""

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x" * 100_000, 0, -1, 1, 0.5, -0.5, 1e300, float("nan"), float("inf")),
    *(1 << 31, (1 << 31) - 1, 10**9, 1 << 63, 10**20, 10**3_000, [], {}, [[]], list(range(100_000))),
)
_LENGTH = struct.Struct("<Q")


class FolderMutant(NamedTuple):
    """A file with one mistake."""

    mistake: str
    name: str
    data: bytes


def mutants(folder: Path, seed: int) -> Iterator[FolderMutant]:
    """Yields mutants of a folder's files, without an end."""
    rng = random.Random(seed)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    while True:
        name = rng.choice(sorted(files))
        mistake, data = _changed(rng, name, files[name])
        yield FolderMutant(f"{name}: {mistake}", name, data)


def _changed(rng: random.Random, name: str, data: bytes) -> tuple[str, bytes]:
    if rng.random() < 0.1:
        end = rng.randrange(len(data) + 1)
        return f"cut at {end}", data[:end]
    if name.endswith(".safetensors"):
        (length,) = _LENGTH.unpack_from(data)
        if rng.random() < 0.1:
            length = rng.choice((0, length - 1, length + 1, len(data), 1 << 40, (1 << 64) - 1))
            return f"a header of {length}", _LENGTH.pack(length) + data[8:]
        mistake, header = _changed_json(rng, data[8 : 8 + length])
        return mistake, _LENGTH.pack(len(header)) + header + data[8 + length :]
    if name.endswith(".json"):
        return _changed_json(rng, data)
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        # the names and shapes of a graph are mostly at its ends
        place = rng.choice((rng.randrange(len(data)), rng.randrange(4_000), len(data) - 1 - rng.randrange(4_000)))
        changed[place % len(data)] = rng.randrange(256)
    return "other bytes", bytes(changed)


def _changed_json(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    if rng.random() < 0.1:
        wrong = rng.choice((b"", b"null", b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"{}", data + b"x"))
        return f"{wrong[:10]!r}", wrong
    document = json.loads(data)
    path, holder, key = "$", document, None
    while isinstance(holder, dict | list) and holder:
        if key is not None and rng.random() < 0.2:
            break
        parent = holder
        key = rng.choice(sorted(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        holder, path = parent[key], f"{path}.{key}"
        target = parent
    if key is None:
        return "as it is", data
    value = rng.choice(_VALUES)
    if isinstance(target, dict) and rng.random() < 0.1:
        del target[key]
        return f"no {path}", json.dumps(document).encode()
    target[key] = value
    return f"{path} = {str(value)[:30]}", json.dumps(document).encode()
