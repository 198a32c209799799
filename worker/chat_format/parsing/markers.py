"""Markers in a stream of text and tokens: special tokens as single characters, and matching of partial markers.

A parser reads one text in which each special token of the format is a single surrogate, a character that no decoded
text can contain. So one search finds both kinds of markers, and text that spells out a special token does not match it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
MAX_WHITESPACE = 64
"""The most whitespace characters that may occur inside a marker, or are held back because they may belong to one."""
WHITESPACE = re.compile(rf"\s{{0,{MAX_WHITESPACE}}}")
_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATES_APART = re.compile("([\ud800-\udfff])")


_SEAMS = re.compile("\\s+|(?<=>)(?=<)|(?<=[\ud800-\udfff])(?=[\ud800-\udfff])")
"""Places where a model may write whitespace that the template does not: between two tags or special tokens."""


class MarkerMatch(Enum):
    """The outcomes of matching a marker that was not found."""

    NO = 0
    MORE = 1
    """The text ends before this can be decided."""


class Alphabet:
    """The characters that stand for a format's special tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)[: LAST_SURROGATE - FIRST_SURROGATE + 1]
        self._characters = {text: chr(FIRST_SURROGATE + place) for place, text in enumerate(longest_first)}
        self._texts = {ord(character): text for text, character in self._characters.items()}
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.by_token = {tokens[text]: character for text, character in self._characters.items()}

    def encode(self, text: str) -> str:
        """Replaces special tokens spelled out in a format's own texts with their characters."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._characters[found[0]], text)

    def split(self, text: str) -> list[str | int]:
        """Returns the parts of a format's own text: special tokens by id, and the texts between them."""
        ids = {character: token for token, character in self.by_token.items()}
        return [ids.get(part, part) for part in _SURROGATES_APART.split(self.encode(text)) if part]

    def decode(self, text: str) -> str:
        """Spells out the special tokens in a text that turned out not to be a marker."""
        return text if text.isascii() else text.translate(self._texts)


def without_surrogates(text: str) -> str:
    """Makes sure that a text forges no special token."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def is_token(character: str) -> bool:
    return FIRST_SURROGATE <= ord(character) <= LAST_SURROGATE


class Marker:
    """A marker's characters, and the whitespace at its edges, which may be missing or longer in a model's output."""

    __slots__ = ("after", "before", "first", "pieces")

    def __init__(self, text: str) -> None:
        core = text.strip()
        self.pieces = tuple(_SEAMS.split(core)) if core else ()
        self.first = core[:1]
        self.before = text[: len(text) - len(text.lstrip())]
        self.after = text[len(text.rstrip()) :] if core else ""

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def match(self, text: str, at: int) -> int | MarkerMatch:
        """Returns where the marker, without the whitespace at its edges, ends if it is at `at`."""
        for place, piece in enumerate(self.pieces):
            if place:
                at = skip_whitespace(text, at)
            if text.startswith(piece, at):
                at += len(piece)
            elif len(text) - at < len(piece) and piece.startswith(text[at:]):
                return MarkerMatch.MORE
            else:
                return MarkerMatch.NO
        return at


def skip_whitespace(text: str, at: int) -> int:
    found = WHITESPACE.match(text, at)
    return found.end() if found else at


def first_of(markers: list[Marker], text: str, at: int) -> int | MarkerMatch:
    """Returns where the first of the markers found at `at` ends."""
    outcome: int | MarkerMatch = MarkerMatch.NO
    for marker in markers:
        if marker:
            end = marker.match(text, at)
            if isinstance(end, int):
                return end
            if end is MarkerMatch.MORE:
                outcome = end
    return outcome


def class_of(characters: set[str]) -> str:
    """Returns a pattern that finds any of these characters."""
    return f"[{re.escape(''.join(sorted(characters)))}]" if characters else r"(?!)"
