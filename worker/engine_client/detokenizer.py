"""Turns sampled tokens into text: whole characters only, and nothing that is or could become a stop string.

Stop strings are found by an Aho-Corasick automaton, which looks at each character once or twice. Its nodes are the
prefixes of the stop strings. The state after a text is the longest prefix that the text ends with. If no stop string
continues with the next character, the next state is looked up at the longest prefix that the state itself ends with,
its fallback:

    of "abd" and "bca"     node        0    1    2    3    4    5    6
                           beginning   ""   a    ab   abd  b    bc   bca
                           fallback         0    4    0    0    0    1

The cost must not depend on the strings, since requests choose them: all the text of a continued completion comes at
once, and a worker that computes for too long fences itself. A table of all next states would be faster, but its size is
the number of nodes times that of distinct characters.
"""

import codecs
import functools
import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class StopAutomaton:
    """Finds the stop string that is completed first; of those completed at the same place, the longest.

    Each of its nodes takes some 16 bytes besides its character."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._chars = [""]
        """The character that leads from each node to the next one by number; empty if there is none."""
        self._forks: dict[int, dict[str, int]] = {0: {}}
        """The other nodes to which a character leads, at most one per stop string, which shares the nodes up to the
        fork."""
        self._depths = array("I", [0])
        self._stops: dict[int, str] = {}
        """The longest stop string that is complete at a node, if any."""
        self._add_nodes(sorted(set(stops)))
        self._starts = self._forks[0]
        self._start_chars = frozenset(self._starts)
        self._fallbacks = array("I", bytes(4 * len(self._chars)))
        self._add_fallbacks()

    def advance(self, state: int, text: str) -> tuple[int, int | None]:
        """Returns the state after `text`, or, if a stop string is completed in it, the state and the place of that.

        The initial state is 0; a state at which a stop string is complete has no successor."""
        if not state and self._start_chars.isdisjoint(text):
            return 0, None
        chars, forks, fallbacks, stops = self._chars, self._forks, self._fallbacks, self._stops
        start = self._starts.get
        for end, char in enumerate(text, start=1):
            while state:
                if chars[state] == char:
                    state += 1
                    break
                if state in forks and char in forks[state]:
                    state = forks[state][char]
                    break
                state = fallbacks[state]
            else:
                state = start(char, 0)
            if state in stops:
                return state, end
        return state, None

    def stop_at(self, state: int) -> str:
        """Returns the longest stop string that is complete at a state; there must be one."""
        return self._stops[state]

    def num_matched(self, state: int) -> int:
        """Returns how many of the last characters could be the beginning of a stop string."""
        return self._depths[state]

    def _add_nodes(self, stops: list[str]) -> None:
        """Adds stop strings in alphabetical order, in which each shares its first nodes with the previous one."""
        previous, path = "", [0]
        for stop in stops:
            shared = sum(itertools.takewhile(bool, map(operator.eq, previous, stop)))
            first = len(self._chars)
            self._forks.setdefault(path[shared], {})[stop[shared]] = first
            self._chars += [*stop[shared + 1 :], ""]
            self._depths.extend(range(shared + 1, len(stop) + 1))
            previous, path = stop, path[: shared + 1] + list(range(first, len(self._chars)))
            self._stops[path[-1]] = stop

    def _add_fallbacks(self) -> None:
        """Sets the fallbacks by depth, since each depends on those of shorter prefixes."""
        chars, forks, fallbacks, stops, advance = self._chars, self._forks, self._fallbacks, self._stops, self.advance
        nodes = list(self._starts.values())
        for node in nodes:
            fallback = fallbacks[node]
            if fallback in stops:
                stops.setdefault(node, stops[fallback])
            if node in stops:  # no state follows
                continue
            if chars[node]:
                fallbacks[node + 1], _ = advance(fallback, chars[node])
                nodes.append(node + 1)
            if node in forks:
                for char, child in forks[node].items():
                    fallbacks[child], _ = advance(fallback, char)
                    nodes.append(child)


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
        text = self.decode(token_id)
        return self._matcher.push(text) if self.num_tokens > self._min_tokens else Text(text)

    def decode(self, token_id: int) -> str:
        """Counts a token and returns the text that it completes, without a look at stop strings."""
        self.num_tokens += 1
        # takes half as long as `codecs.getincrementaldecoder`, which does the same in Python
        data = self._token_bytes[token_id]
        if self._partial:
            data = self._partial + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._partial = data[used:]
        return text

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """Adds tokens and returns the text of each, up to the first that completes a stop string: if one does, there
        are fewer texts than tokens, and no more can be added."""
        before = self.num_tokens
        texts = [self.decode(token_id) for token_id in token_ids]
        unmatched = max(0, self._min_tokens - before)
        texts = texts[:unmatched] + self._matcher.push_all(texts[unmatched:])
        self.num_tokens = before + len(texts)
        return texts

    def count_hidden_token(self) -> None:
        """Counts a token whose text is not part of the completion, such as a stop token."""
        self.num_tokens += 1

    def flush(self) -> str:
        """Returns everything held back at the completion's end; an incomplete character becomes U+FFFD."""
        rest = codecs.utf_8_decode(self._partial, "replace", True)[0]
        self._partial = b""
        return self._matcher.flush() + rest
