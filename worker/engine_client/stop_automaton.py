"""Finds any of several stop strings in a text by looking at each character once or twice.

This is the Aho-Corasick automaton. Its nodes are the prefixes of the stop strings. The state after a text is the
longest prefix that the text ends with. If no stop string continues with the next character, the next state is looked up
at the longest prefix that the state itself ends with, its fallback:

    of "abd" and "bca"     node        0    1    2    3    4    5    6
                           beginning   ""   a    ab   abd  b    bc   bca
                           fallback         0    4    0    0    0    1

The cost must not depend on the strings, since requests choose them: all the text of a continued completion comes at
once, and a worker that computes for too long fences itself. A table of all next states would be faster, but its size is
the number of nodes times that of distinct characters."""

import itertools
import operator
from array import array
from collections.abc import Iterable


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
