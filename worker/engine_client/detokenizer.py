"""Turns sampled tokens into text: whole characters only, and nothing that is or could become a stop string."""

import codecs
import functools
from collections.abc import Sequence
from typing import NamedTuple

from tokenbus.worker.engine_client.stop_automaton import StopAutomaton

_REMEMBERED_STEPS = 16_384
"""Texts remembered with the states before and after them: about as many as fit in a few MiB."""


class Text(NamedTuple):
    """Text that may be published now, and the stop string that ends the completion, if one does."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that is completed first in a stream of text, and holds back what could be the start of one.

    If several end at the same character, the longest wins. How the text is split into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = StopAutomaton(stops) if stops else None
        self._state = 0
        self._held = ""
        """The possible start of a stop string; the state gives its length."""

    def push(self, text: str) -> Text:
        """Takes more text and returns what can no longer be part of a stop string."""
        if self._automaton is None:
            return Text(text)
        state, end = self._automaton.advance(self._state, text)
        if end is None:
            return Text(self._hold_back(text, state))
        stop = self._automaton.stop_at(state)
        return Text((self.flush() + text[:end]).removesuffix(stop), stop)

    def push_all(self, texts: list[str]) -> list[str]:
        """Takes texts and returns what may be published with each, up to the first that completes a stop string."""
        if self._automaton is None:
            return texts
        # tokens repeat: scanning each of 100,000 tokens of 256 characters would take seconds
        advance = functools.lru_cache(_REMEMBERED_STEPS)(self._automaton.advance)
        published = []
        for text in texts:
            state, end = advance(self._state, text)
            if end is not None:
                break
            published.append(self._hold_back(text, state))
        return published

    def flush(self) -> str:
        """Returns the held-back text, when no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _hold_back(self, text: str, state: int) -> str:
        """Returns what can be published when `text` leads to a state."""
        if not state and not self._state:
            return text
        assert self._automaton is not None
        text = self._held + text
        cut = len(text) - self._automaton.num_matched(state)
        self._held, self._state = text[cut:], state
        return text[:cut]


class Detokenizer:
    """The growing text of one generation. `token_bytes` are the bytes of each token, by token id."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str], min_tokens: int) -> None:
        self._token_bytes = token_bytes
        self._partial = b""
        """The first bytes of a character."""
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, token_id: int) -> Text:
        """Counts a token and adds its text; looks for stop strings once there are more than `min_tokens`."""
        self.num_tokens += 1
        text = self._decode(self._token_bytes[token_id])
        return self._matcher.push(text) if self.num_tokens > self._min_tokens else Text(text)

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """Adds tokens and returns the text of each, up to the first that completes a stop string: if one does, there
        are fewer texts than tokens, and no more can be added."""
        texts = [self._decode(self._token_bytes[token_id]) for token_id in token_ids]
        unmatched = max(0, self._min_tokens - self.num_tokens)
        texts = texts[:unmatched] + self._matcher.push_all(texts[unmatched:])
        self.num_tokens += len(texts)
        return texts

    def count_hidden_token(self) -> None:
        """Counts a token whose text is not part of the completion, such as a stop token."""
        self.num_tokens += 1

    def flush(self) -> str:
        """Returns everything held back at the completion's end; an incomplete character becomes U+FFFD."""
        rest = codecs.utf_8_decode(self._partial, "replace", True)[0]
        self._partial = b""
        return self._matcher.flush() + rest

    def _decode(self, data: bytes) -> str:
        # takes half as long as `codecs.getincrementaldecoder`, which does the same in Python
        data = self._partial + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._partial = data[used:]
        return text
