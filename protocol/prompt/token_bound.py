"""A lower bound on the tokens of a text, so that a prompt which is certainly too long is refused without tokenizing it.

Let `longest(b)` be the length in bytes of the longest token in which the byte b occurs. A token of n bytes is made of
bytes whose `longest` is at least n, so that the sum of 1 / longest(b) over its bytes is at most 1. Hence the sum over
all bytes of a text is at most the number of its tokens, however it is cut:

    tokens >= sum over the bytes b of the text of 1 / longest(b)

This holds where each byte of a text is part of exactly one token. `from_tokenizer_json` knows the tokenizers of
which that is
certain: byte pair encoding in which every byte has a token, without anything that removes or shortens text.
"""

import math
from typing import Any

import msgspec
import numpy as np

Json = dict[str, Any]

_KEEPS_ALL = ("ByteLevel", "Metaspace", "Digits", "Split")
"""Pre-tokenizers that cut a text and remove nothing, a `Split` unless it says so."""
_BYTES = 256


class TokenBound:
    """Says how many tokens a text has at least. Immutable, so safe to use from several threads."""

    def __init__(self, rewrites: tuple[tuple[str, str], ...], longest: list[int]) -> None:
        assert len(longest) == _BYTES
        assert min(longest) >= 1
        self._rewrites = rewrites
        self._shares = 1.0 / np.array(longest, dtype=np.float64)

    def __repr__(self) -> str:
        return f"<TokenBound, at most {1 / self._shares.min():.0f} bytes a token>"

    def min_tokens(self, text: str) -> int:
        """The tokens that a text has at least."""
        for old, new in self._rewrites:
            text = text.replace(old, new)
        counts = np.bincount(np.frombuffer(text.encode(errors="replace"), dtype=np.uint8), minlength=_BYTES)
        return math.ceil(float(counts @ self._shares) * (1 - 1e-9) - 1e-9)


def from_tokenizer_json(tokenizer_json: str) -> TokenBound | None:
    """None for a tokenizer of which it is not certain that each byte of a text is part of a token."""
    try:
        document = msgspec.json.decode(tokenizer_json)
        return _bound(document)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


def _bound(document: Json) -> TokenBound | None:
    model, added = document["model"], document.get("added_tokens") or []
    cuts = _steps(document.get("pre_tokenizer"), "pretokenizers")
    if document.get("truncation") is not None or not all(map(_keeps_all, cuts)):
        return None
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    rewrites = _rewrites(_steps(document.get("normalizer"), "normalizers"), cuts)
    is_byte_level = any(cut["type"] == "ByteLevel" for cut in cuts)
    if rewrites is None or not _has_every_byte(model, is_byte_level=is_byte_level):
        return None
    letters = _letters() if is_byte_level else {}
    pieces = [_bytes_of(token, letters) for token in model["vocab"]]
    for token in added:
        pieces += [token["content"].encode(), _rewritten(token["content"], rewrites).encode()]
    return TokenBound(rewrites, _longest(pieces))


def _steps(step: Json | None, name: str) -> list[Json]:
    if step is None:
        return []
    return [inner for one in step[name] for inner in _steps(one, name)] if step["type"] == "Sequence" else [step]


def _keeps_all(cut: Json) -> bool:
    return cut["type"] in _KEEPS_ALL and cut.get("behavior") != "Removed"


def _rewrites(steps: list[Json], cuts: list[Json]) -> tuple[tuple[str, str], ...] | None:
    """What is replaced in a text before it is cut; None where something else is done to it that may shorten it."""
    found = []
    for step in steps:
        if step["type"] == "Replace" and (old := step["pattern"].get("String")):
            found.append((old, step["content"]))
        elif step["type"] != "Prepend":
            return None
    return (*found, *((" ", cut["replacement"]) for cut in cuts if cut["type"] == "Metaspace"))


def _rewritten(text: str, rewrites: tuple[tuple[str, str], ...]) -> str:
    for old, new in rewrites:
        text = text.replace(old, new)
    return text


def _has_every_byte(model: Json, *, is_byte_level: bool) -> bool:
    if is_byte_level:
        return all(letter in model["vocab"] for letter in _letters())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(_BYTES))


def _bytes_of(token: str, letters: dict[str, int]) -> bytes:
    """What a token of the vocabulary stands for; of one that is not made of letters for bytes, its own text."""
    if letters and all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _longest(pieces: list[bytes]) -> list[int]:
    """By byte: how long the longest piece is in which it occurs."""
    longest = [1] * _BYTES
    known: set[int] = set()
    for piece in sorted(pieces, key=len, reverse=True):
        new = set(piece) - known
        known |= new
        for byte in new:
            longest[byte] = len(piece)
    return longest


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in vocabularies of the `ByteLevel` kind, as GPT-2 chose them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(_BYTES + at): byte for at, byte in enumerate(others)}
