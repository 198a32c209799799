"""Computes a lower bound on the number of tokens of a text, to refuse overlong prompts without tokenizing them.

Let `longest(b)` be the length in bytes of the longest token that contains the byte b. A token of n bytes consists of
bytes whose `longest` is at least n, so the sum of 1 / longest(b) over its bytes is at most 1. Summed over a whole text,
however it is split into tokens:

    tokens >= sum over the bytes b of the text of 1 / longest(b)

This holds only if each byte of the text belongs to exactly one token. `from_tokenizer_json` accepts the tokenizers for
which that is certain: byte pair encoding with a token for every byte, and no step that removes or shortens text.
"""

import math
from typing import Any

import msgspec
import numpy as np

Json = dict[str, Any]

_LOSSLESS = ("ByteLevel", "Metaspace", "Digits", "Split")
"""Pre-tokenizers that split a text without removing anything; `Split` may remove text, but says so."""
_BYTES = 256


class TokenBound:
    """A lower bound on the number of tokens of any text. Immutable, so thread-safe."""

    def __init__(self, rewrites: tuple[tuple[str, str], ...], longest: list[int]) -> None:
        """`rewrites` are replacements applied to a text before splitting; `longest` has one entry for each byte."""
        assert len(longest) == _BYTES
        assert min(longest) >= 1
        self._rewrites = rewrites
        self._shares = 1.0 / np.array(longest, dtype=np.float64)

    def __repr__(self) -> str:
        return f"<TokenBound, at most {1 / self._shares.min():.0f} bytes a token>"

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` is certain to have or to exceed."""
        text = _rewritten(text, self._rewrites)
        counts = np.bincount(np.frombuffer(text.encode(errors="replace"), dtype=np.uint8), minlength=_BYTES)
        # The sum has rounding errors: without the two margins it could exceed the true bound by one token.
        return math.ceil(float(counts @ self._shares) * (1 - 1e-9) - 1e-9)


def from_tokenizer_json(tokenizer_json: str) -> TokenBound | None:
    """Returns None unless it is certain that this tokenizer makes each byte of a text part of a token."""
    try:
        return _bound(msgspec.json.decode(tokenizer_json))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


def _bound(document: Json) -> TokenBound | None:
    model, added = document["model"], document.get("added_tokens") or []
    splits = _steps(document.get("pre_tokenizer"), "pretokenizers")
    # Anything that shortens a text or drops parts of it would make the bound too high, and refuse prompts that fit.
    if document.get("truncation") is not None:
        return None
    if any(split["type"] not in _LOSSLESS or split.get("behavior") == "Removed" for split in splits):
        return None
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    # Such added tokens swallow the spaces beside them.
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    rewrites = _rewrites(_steps(document.get("normalizer"), "normalizers"), splits)
    letters = byte_letters() if any(split["type"] == "ByteLevel" for split in splits) else {}
    if rewrites is None or not (letters or model.get("byte_fallback")):
        return None
    # A byte without a token of its own could become the unknown token, together with its neighbours.
    if not all(token in model["vocab"] for token in letters or [f"<0x{byte:02X}>" for byte in range(_BYTES)]):
        return None
    tokens = [_token_bytes(token, letters) for token in model["vocab"]]
    for token in added:  # these match before or after the rewrites, depending on the tokenizer: both forms count
        tokens += [token["content"].encode(), _rewritten(token["content"], rewrites).encode()]
    return TokenBound(rewrites, _longest(tokens))


def _steps(step: Json | None, name: str) -> list[Json]:
    """Returns the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if step is None:
        return []
    return [inner for one in step[name] for inner in _steps(one, name)] if step["type"] == "Sequence" else [step]


def _rewrites(normalizers: list[Json], splits: list[Json]) -> tuple[tuple[str, str], ...] | None:
    """Returns the (old, new) replacements made before a text is split, or None if a normalizer may shorten the text."""
    found = []
    for step in normalizers:
        if step["type"] == "Replace" and (old := step["pattern"].get("String")):
            found.append((old, step["content"]))
        elif step["type"] != "Prepend":  # which only adds text and so can be ignored in a lower bound
            return None
    return (*found, *((" ", split["replacement"]) for split in splits if split["type"] == "Metaspace"))


def _rewritten(text: str, rewrites: tuple[tuple[str, str], ...]) -> str:
    for old, new in rewrites:
        text = text.replace(old, new)
    return text


def _token_bytes(token: str, letters: dict[str, int]) -> bytes:
    """Returns the bytes that a vocabulary entry stands for."""
    if letters and all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _longest(tokens: list[bytes]) -> list[int]:
    """Returns, for each byte, the length of the longest token that contains it (1 if none does)."""
    longest = [1] * _BYTES
    known: set[int] = set()
    for token in sorted(tokens, key=len, reverse=True):  # the first token that contains a byte is its longest
        new = set(token) - known
        known |= new
        for byte in new:
            longest[byte] = len(token)
    return longest


def byte_letters() -> dict[str, int]:
    """Returns GPT-2's mapping from letters to the bytes that they stand for in `ByteLevel` vocabularies."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(_BYTES + at): byte for at, byte in enumerate(others)}
