"""Makes mutants of a GGUF file: each has one mistake in its header, which the seed chooses."""

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_MARKED = 24
"""The values of an array that may be changed; all of a vocabulary's would be nearly all that a file has."""
_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    1 << 15,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 63,
    (1 << 64) - 1,
)
_FLOATS = (0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"), float("-inf"))


class Place(NamedTuple):
    """A part of a header."""

    name: str
    kind: str
    """`number`, `float`, `text`, `type` or `length`."""
    start: int
    width: int


class Mutant(NamedTuple):
    """A header with one mistake."""

    mistake: str
    data: bytes


def mutants(path: Path, seed: int) -> Iterator[Mutant]:
    """Yields mutants of the header of a file, without an end. The rest of the file belongs behind each."""
    rng = random.Random(seed)
    data = path.read_bytes()
    places, end = _places(data)
    kinds = sorted({place.kind for place in places})
    while True:
        kind = rng.choice(kinds)
        place = rng.choice([one for one in places if one.kind == kind])
        changed = bytearray(data[:end])
        value = _value(rng, place, data)
        changed[place.start : place.start + place.width] = value
        yield Mutant(f"{place.name} {place.kind} = {value[:24]!r}", bytes(changed))


def header_bytes(path: Path) -> int:
    """Returns the length of a file's header."""
    return _places(path.read_bytes())[1]


def _value(rng: random.Random, place: Place, data: bytes) -> bytes:
    old = data[place.start : place.start + place.width]
    if place.kind == "text":
        if not old or rng.random() < 0.3:
            return rng.randbytes(rng.choice((0, 1, 7, 300)))  # moves everything behind it
        at = rng.randrange(len(old))
        return old[:at] + bytes([rng.randrange(256)]) + old[at + 1 :]
    if place.kind == "float" and rng.random() < 0.8:
        return struct.pack("<f" if place.width == 4 else "<d", rng.choice(_FLOATS))
    if place.kind == "type":
        return struct.pack("<I", rng.randrange(60))[: place.width]
    before = int.from_bytes(old, "little")
    number = rng.choice((*_NUMBERS, before + 1, before - 1, before * 2, before // 2, before ^ 1 << rng.randrange(64)))
    return (number % (1 << 8 * place.width)).to_bytes(place.width, "little")


def _places(data: bytes) -> tuple[list[Place], int]:
    """Returns the places in a header that may be changed, and its end."""
    found = [
        Place("version", "number", 4, 4),
        Place("tensors", "length", 8, 8),
        Place("keys", "length", 16, 8),
    ]
    (num_tensors, num_keys), at = struct.unpack_from("<QQ", data, 8), 24

    def read(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value)

    def text(name: str, *, is_marked: bool = True) -> str:
        nonlocal at
        length = read("<Q")
        if is_marked:
            found.extend((Place(name, "length", at - 8, 8), Place(name, "text", at, length)))
        at += length
        return data[at - length : at].decode(errors="replace")

    def value(name: str, kind: int, *, is_marked: bool = True) -> None:
        nonlocal at
        if kind == _STRING:
            text(name, is_marked=is_marked)
            return
        if is_marked:
            found.append(Place(name, "float" if kind in (6, 12) else "number", at, _WIDTHS[kind]))
        at += _WIDTHS[kind]

    for number in range(num_keys):
        name = text(f"key {number}")
        found.append(Place(name, "type", at, 4))
        kind = read("<I")
        if kind != _ARRAY:
            value(name, kind)
            continue
        found += [Place(f"{name}[]", "type", at, 4), Place(name, "length", at + 4, 8)]
        kind, count = read("<I"), read("<Q")
        for index in range(count):
            value(f"{name}[{index}]", kind, is_marked=index % (count // _MAX_MARKED + 1) == 0)
    for number in range(num_tensors):
        name = text(f"tensor {number}")
        found.append(Place(f"{name} dimensions", "length", at, 4))
        for index in range(read("<I")):
            found.append(Place(f"{name} shape[{index}]", "number", at, 8))
            read("<Q")
        found += [Place(name, "type", at, 4), Place(f"{name} offset", "number", at + 4, 8)]
        read("<I"), read("<Q")
    return found, at
