"""What a stream has said so far, kept so that it can be said again from any token on."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_JSON_GROWTH = 6
"""A control character of one byte becomes six in JSON."""
_TOKEN_ID_BYTES = 11
"""A token id in JSON, with its comma."""


class Passage(NamedTuple):
    """Consecutive tokens of a completion, with the text that came with them."""

    offset: int
    num_tokens: int
    text_offset: int
    text: str
    token_ids: list[int]


class History:
    """Text and token ids of one completion. Offsets are in tokens, text offsets in UTF-8 bytes.

    A token's text is what could be said when it was sampled: nothing where it was held back, and together with the
    next one's where a character spans the two."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._text_ends = array("I")
        self._token_ids = array("I")

    def __repr__(self) -> str:
        return f"<History of {self.num_tokens} tokens, {len(self._text)} bytes>"

    @property
    def num_tokens(self) -> int:
        return len(self._text_ends)

    @property
    def text_bytes(self) -> int:
        return len(self._text)

    @property
    def held_bytes(self) -> int:
        """Memory that this history takes."""
        return len(self._text) + 8 * len(self._text_ends)

    def append(self, token_ids: Sequence[int], text: str) -> None:
        """Takes what was sampled and said next; text without a token belongs to the last one."""
        self._text += text.encode()
        end = len(self._text)
        for _ in token_ids[1:]:
            self._text_ends.append(end - len(text.encode()))
        if token_ids:
            self._text_ends.append(end)
        elif self._text_ends:
            self._text_ends[-1] = end
        self._token_ids.extend(token_ids)

    def whole(self) -> Passage:
        """All of it."""
        return Passage(0, self.num_tokens, 0, self._text.decode(), list(self._token_ids))

    def since(self, offset: int, max_bytes: int) -> Iterator[Passage]:
        """Everything from a token on, in passages that take at most `max_bytes` as JSON, or hold a single token."""
        start = offset
        while start < self.num_tokens:
            stop = self._reach(start, max_bytes)
            yield self._passage(start, stop)
            start = stop

    def _reach(self, start: int, max_bytes: int) -> int:
        """Behind the last token that still fits a passage from `start` on: found by halving."""
        low, high = start + 1, self.num_tokens
        text_start = self._text_offset(start)
        while low < high:
            middle = (low + high + 1) // 2
            size = _JSON_GROWTH * (self._text_ends[middle - 1] - text_start) + _TOKEN_ID_BYTES * (middle - start)
            low, high = (middle, high) if size <= max_bytes else (low, middle - 1)
        return low

    def _passage(self, start: int, stop: int) -> Passage:
        text_start, text_end = self._text_offset(start), self._text_ends[stop - 1]
        text = self._text[text_start:text_end].decode()
        return Passage(start, stop - start, text_start, text, list(self._token_ids[start:stop]))

    def _text_offset(self, offset: int) -> int:
        return self._text_ends[offset - 1] if offset else 0
