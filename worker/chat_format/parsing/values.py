"""Values in models' notations, rewritten as JSON while they arrive; the tool's schema says what unquoted ones are."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from enum import Enum
from typing import Any

import msgspec

from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import Alphabet, is_token, without_surrogates
from tokenbus.worker.chat_format.parsing.schemas import type_of
from tokenbus.worker.contract.chat_format import Values

MAX_DEPTH = 200
MAX_SCALAR = 1024
"""The most characters of a number or of an unquoted key."""
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SCALAR = re.compile(r"[^\s,:\[\]{}()\"']*")
_JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PYTHON_CODE = re.compile(r"\\x[0-9a-fA-F]{2}|\\U000[0-9a-fA-F]{5}|\\U0010[0-9a-fA-F]{4}")
_PYTHON_LENGTHS = {"x": 4, "U": 10}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\"}
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def escape(text: str) -> str:
    """Returns a text escaped for use inside a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


class _Want(Enum):
    VALUE = 0
    VALUE_OR_END = 1
    KEY = 2
    KEY_OR_END = 3
    COLON = 4
    NEXT = 5
    STRING = 6
    DONE = 7


class ValueReader:
    """Reads one value and appends it to `out` as JSON, fragment by fragment. Only what can't be decided yet is held
    back: escapes, numbers, and unquoted keys."""

    def __init__(self, notation: Values, alphabet: Alphabet, quote: str = '"') -> None:
        self._alphabet = alphabet
        self._bare = notation is Values.BARE_KEYS
        self._python = notation is Values.PYTHON
        self._quotes = ('"', "'") if self._python else (quote,)
        self._quote = quote
        self._plain = _plain(quote)
        self._want = _Want.VALUE
        self._key = False
        self._open: list[str] = []
        self._steps = {
            _Want.VALUE: self._value,
            _Want.VALUE_OR_END: self._value,
            _Want.KEY: self._read_key,
            _Want.KEY_OR_END: self._read_key,
            _Want.COLON: self._colon,
            _Want.NEXT: self._next,
        }

    def read(self, cursor: Cursor, out: list[str]) -> bool:
        """Continues reading; returns whether the value is complete; raises `Malformed` if it can't become a value."""
        while self._want is not _Want.DONE:
            if self._want is _Want.STRING:
                if not self._string(cursor, out):
                    return False
                continue
            cursor.skip_whitespace()
            if cursor.at == len(cursor.text) or not self._steps[self._want](cursor, out):
                return False
        return True

    def _value(self, cursor: Cursor, out: list[str]) -> bool:
        text, at = cursor.text, cursor.at
        character = text[at]
        if character in "{[":
            if len(self._open) == MAX_DEPTH:
                raise Malformed
            self._open.append(character)
            self._want = _Want.KEY_OR_END if character == "{" else _Want.VALUE_OR_END
            out.append(character)
            cursor.at = at + 1
            return True
        if character == "]" and self._want is _Want.VALUE_OR_END:
            return self._close(cursor, out)
        quote = self._quote_at(cursor)
        if quote is None:
            return False
        if quote:
            return self._begin_string(cursor, out, quote, key=False)
        return self._scalar(cursor, out)

    def _scalar(self, cursor: Cursor, out: list[str]) -> bool:
        found = _SCALAR.match(cursor.text, cursor.at)
        assert found is not None
        if found.end() - cursor.at > MAX_SCALAR:
            raise Malformed
        if found.end() == len(cursor.text) and not cursor.ended:
            return False
        literal = LITERALS.get(found[0])
        if literal is None and not NUMBER.fullmatch(found[0]):
            raise Malformed
        out.append(literal or found[0])
        cursor.at = found.end()
        self._after_value()
        return True

    def _read_key(self, cursor: Cursor, out: list[str]) -> bool:
        if cursor.text[cursor.at] == "}" and (self._want is _Want.KEY_OR_END or self._python):
            return self._close(cursor, out)
        quote = self._quote_at(cursor)
        if quote is None:
            return False
        if quote:
            return self._begin_string(cursor, out, quote, key=True)
        if not self._bare:
            raise Malformed
        end = cursor.text.find(":", cursor.at, cursor.at + MAX_SCALAR)
        if end < 0:
            if len(cursor.text) - cursor.at >= MAX_SCALAR:
                raise Malformed
            return False
        out.append(f'"{escape(self._alphabet.decode(cursor.text[cursor.at : end].strip()))}"')
        cursor.at = end
        self._want = _Want.COLON
        return True

    def _colon(self, cursor: Cursor, out: list[str]) -> bool:
        if cursor.text[cursor.at] != ":":
            raise Malformed
        out.append(": ")
        cursor.at += 1
        self._want = _Want.VALUE
        return True

    def _next(self, cursor: Cursor, out: list[str]) -> bool:
        if cursor.text[cursor.at] != ",":
            return self._close(cursor, out)
        out.append(", ")
        cursor.at += 1
        self._want = _Want.KEY if self._open[-1] == "{" else _Want.VALUE
        return True

    def _close(self, cursor: Cursor, out: list[str]) -> bool:
        character = cursor.text[cursor.at]
        if character != ("}" if self._open.pop() == "{" else "]"):
            raise Malformed
        out.append(character)
        cursor.at += 1
        self._after_value()
        return True

    def _after_value(self) -> None:
        self._want = _Want.NEXT if self._open else _Want.DONE

    def _quote_at(self, cursor: Cursor) -> str | None:
        """Returns the quote at the cursor, an empty text if there is none, or None if more text is needed to tell."""
        for quote in self._quotes:
            if cursor.text.startswith(quote, cursor.at):
                return quote
            if quote.startswith(cursor.text[cursor.at : cursor.at + len(quote)]):
                return None
        return ""

    def _begin_string(self, cursor: Cursor, out: list[str], quote: str, *, key: bool) -> bool:
        self._quote, self._key = quote, key
        self._plain = _plain(quote)
        out.append('"')
        cursor.at += len(quote)
        self._want = _Want.STRING
        return True

    def _string(self, cursor: Cursor, out: list[str]) -> bool:
        """Copies a string up to its end or the end of the text."""
        text, quote = cursor.text, self._quote
        while True:
            found = self._plain.match(text, cursor.at)
            if found:
                out.append(escape(found[0]) if self._bare or self._python else found[0])
                cursor.at = found.end()
            if cursor.at == len(text):
                return False
            character = text[cursor.at]
            if text.startswith(quote, cursor.at):
                out.append('"')
                cursor.at += len(quote)
                break
            if quote.startswith(text[cursor.at : cursor.at + len(quote)]) and not cursor.ended:
                return False
            if character == "\\" and not self._bare:
                if not self._escape(cursor, out):
                    return False
                continue
            out.append(escape(self._alphabet.decode(character)) if is_token(character) else escape(character))
            cursor.at += 1
        if self._key:
            self._want = _Want.COLON
        else:
            self._after_value()
        return True

    def _escape(self, cursor: Cursor, out: list[str]) -> bool:
        """Copies an escape; a backslash that escapes nothing is literal."""
        text, at = cursor.text, cursor.at
        kind = text[at + 1 : at + 2]
        length = 6 if kind == "u" else _PYTHON_LENGTHS.get(kind, 2) if self._python else 2
        if len(text) - at < length and not cursor.ended:
            return False
        piece = text[at : at + length]
        if _JSON_ESCAPE.fullmatch(piece):
            out.append(piece)
        elif self._python and kind and kind in "'\"\\ntrbf0\n":
            out.append(escape(_PYTHON_ESCAPES.get(kind, kind)))
        elif self._python and _PYTHON_CODE.fullmatch(piece):
            out.append(escape(without_surrogates(chr(int(piece[2:], 16)))))
        else:
            length = 1
            out.append("\\\\")
        cursor.at = at + length
        return True


@functools.lru_cache(maxsize=64)
def _plain(quote: str) -> re.Pattern[str]:
    """Returns a pattern for the part of a string that can be copied verbatim."""
    return re.compile(rf"[^\\\x00-\x1f\ud800-\udfff{re.escape(quote[:1])}]+")


_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=float)
"""Also accepts numbers that no float can hold, such as `1e999`."""


def to_json(text: str, types: Collection[str]) -> str:
    """Returns the JSON of an unquoted value: of a type that the schema allows if it can be read as one, else a string
    if that is allowed, else whatever it looks like."""
    value, parsed = _parse(text)
    if parsed and (not types or type_of(value) in types or (isinstance(value, int) and "number" in types)):
        return msgspec.json.encode(value).decode() if text.strip() in LITERALS else text.strip()
    if not parsed or "string" in types:
        return msgspec.json.encode(text).decode()
    return text.strip()


def _parse(text: str) -> tuple[Any, bool]:
    stripped = text.strip()
    try:
        return _DECODER.decode(LITERALS.get(stripped, stripped)), True
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None, False
