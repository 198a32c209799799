"""Turns sampled tokens into text: whole characters only, and nothing that is or could become a stop string; pure."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """Text that may be published now, and the stop string that ends the completion, if one does."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that is complete first in a stream of text, and holds back what could be the start of one.

    If several end at the same character, the longest wins. How the text is split into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(map(_Stop, stops))
        self._held = ""

    def push(self, text: str) -> Text:
        """Takes more text and returns what can no longer be part of a stop string."""
        if not self._stops:
            return Text(text)
        # the tuple's order decides: the earliest end, then the longest
        found = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.push(text)) is not None]
        text = self._held + text
        if found:
            end, _, stop_text = min(found)
            at = len(self._held) + end - len(stop_text)
            self._forget()
            return Text(text[:at], stop_text)
        # the longest possible start of any stop string is held back
        keep = max(stop.num_matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Text(text[: len(text) - keep])

    def flush(self) -> str:
        """Returns the text that is held back, when no more will come."""
        held = self._held
        self._forget()
        return held

    def _forget(self) -> None:
        self._held = ""
        for stop in self._stops:
            stop.num_matched = 0


class _Stop:
    """One stop string, and how much of it the text ends with.

    Each character is looked at once or twice (Knuth, Morris, Pratt), whatever the strings are: all the text of a
    completion that continues comes at once, and a worker that computes for too long takes itself for cut off."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0] * len(text)
        """For each start of the string, the length of its longest other start that it ends with."""
        border = 0
        for at in range(1, len(text)):
            border = self._borders[at] = self._next(border, text[at])

    def push(self, text: str) -> int | None:
        """Takes more text; returns where in it the string is complete for the first time, or None."""
        matched = self.num_matched
        if not matched and self.text[0] not in text:
            return None
        for end, char in enumerate(text, start=1):
            matched = self._next(matched, char)
            if matched == len(self.text):
                return end
        self.num_matched = matched
        return None

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == char)


class Detokenizer:
    """The growing text of one generation. `token_bytes` are the bytes of each token, by token id."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str], min_tokens: int) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, token_id: int) -> Text:
        """Counts a token and adds its text; looks for stop strings once there are more than `min_tokens`."""
        self.num_tokens += 1
        text = self._decoder.decode(self._token_bytes[token_id])
        return self._matcher.push(text) if self.num_tokens > self._min_tokens else Text(text)

    def count_hidden_token(self) -> None:
        """Counts a token whose text is not part of the completion, such as a stop token."""
        self.num_tokens += 1

    def flush(self) -> str:
        """Returns everything held back at the completion's end; an incomplete character becomes U+FFFD."""
        return self._matcher.flush() + self._decoder.decode(b"", final=True)
