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
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Text:
        """Takes more text and returns what can no longer be part of a stop string."""
        if not self._stops:
            return Text(text)
        text = self._held + text
        # the tuple's order decides: the earliest end, then the earliest start, which is the longest
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return Text(text[:at], stop)
        # the longest possible start of any stop string is held back
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Text(text[: len(text) - keep])

    def flush(self) -> str:
        """Returns the text that is held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


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
