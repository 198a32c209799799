"""Makes text of sampled tokens: whole characters only, and nothing that is or could become a stop string."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """What may be said now, and the stop string that ends the completion, if one does."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first of several strings to be complete in a stream of text, holding back what could be its beginning.

    Of several that end at the same place it is the longest; how the text was cut makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Text:
        """Takes more text; gives what can't be part of a stop string any more."""
        if not self._stops:
            return Text(text)
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return Text(text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Text(text[: len(text) - keep])

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
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
        """Counts a token and adds its text; stop strings are looked for once `min_tokens` are there."""
        self.num_tokens += 1
        text = self._decoder.decode(self._token_bytes[token_id])
        return self._matcher.push(text) if self.num_tokens > self._min_tokens else Text(text)

    def count_hidden_token(self) -> None:
        """Counts a token whose text is not part of the completion: the one that ends it."""
        self.num_tokens += 1

    def flush(self) -> str:
        """Everything that was held back, at the end of the completion; half a character becomes U+FFFD."""
        return self._matcher.flush() + self._decoder.decode(b"", final=True)
