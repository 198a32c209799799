"""Counts lists, objects and strings of a message before it is decoded: each may take a hundred times its size then."""

import re

_IN_JSON = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[\[{]', re.DOTALL)
"""A string, or the beginning of a list or of an object."""
_LISTS_AND_MAPS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
_NO_STRUCTURE = re.compile(
    rb"(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]+|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8})*+", re.DOTALL
)
"""Numbers, booleans and null in MessagePack."""
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Bytes of the length that follows, by the first byte."""
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def json_has_more(payload: bytes, most: int) -> bool:
    """Whether a message in JSON has more lists and objects than `most`, counted together with its strings.

    Counting stops beyond `most`. Brackets may be in strings as well, but usually there are not even so many of them."""
    if len(payload) <= most or payload.count(b"[") + payload.count(b"{") <= most:
        return False
    # a loop of its own, so that other threads go on meanwhile
    return any(number >= most for number, _ in enumerate(_IN_JSON.finditer(payload)))


def msgpack_has_more(payload: bytes, most: int) -> bool:
    """The same for a message in MessagePack."""
    if len(payload) <= most or len(payload) - len(payload.translate(None, _LISTS_AND_MAPS)) <= most:
        return False
    at, size = 0, len(payload)
    for _ in range(most + 1):
        at = _NO_STRUCTURE.match(payload, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at >= size:
            return False
        at = _end_of_head(payload, at)
    return True


def _end_of_head(payload: bytes, at: int) -> int:
    """Returns where a string ends, or the head of a list or object; the end of a message that is malformed."""
    first = payload[at]
    after = at + 1
    if first < 0xA0:
        return after
    if first < 0xC0:
        return after + first - 0xA0
    if first >= 0xDC:
        return after + (4 if first % 2 else 2)
    if first in _FIXED_EXTENSIONS:
        return after + 1 + _FIXED_EXTENSIONS[first]
    kind = _STRINGS.get(first) or _EXTENSIONS.get(first)
    if kind is None:
        return len(payload)
    return after + kind + (first in _EXTENSIONS) + int.from_bytes(payload[after : after + kind])
