"""The lengths of recent answers, and the tokens that a sequence is expected to add to its own; pure.

`max_tokens` says little: agents ask for thousands of tokens and use a hundred. What answers of this model have lately
used says more. Of an answer that has n tokens already, only those that became longer than n tell anything:

    recent lengths    60   70   90   200   240        n = 80: (90 + 200 + 240) / 3 - 80 = 97 more are expected

An answer that is longer than all of them is expected to become twice as long, if it is the only such one. Several say
together that answers have become longer: where k of them have n tokens each and none has ended, k * n tokens are
expected between two ends, and so many more of each. (That is the mean of an exponential distribution, estimated from
observations that go on, as if one of them ended now.)
"""

import bisect
from collections import deque
from itertools import accumulate

_WINDOW = 64
"""The number of answers that are remembered."""
_FIRST_EXPECTED = 256
"""Tokens that an answer is expected to have before any has ended."""
_MIN_REMAINING = 64
"""At least so many more tokens are expected of any answer, so that the next few steps have room."""


class AnswerLengths:
    """Learns how long answers become. With `fixed` above 0, all are expected to have so many tokens."""

    def __init__(self, fixed: int = 0) -> None:
        assert fixed >= 0, fixed
        self._fixed = fixed
        self._recent: deque[int] = deque(maxlen=_WINDOW)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]
        """The sums of the longest recent answers: of none, of the longest, of the two longest, and so on."""

    def __repr__(self) -> str:
        return f"<AnswerLengths, {self.remaining(0)} tokens expected>"

    @property
    def longest(self) -> int:
        """The tokens beyond which nothing is known of answers."""
        return self._sorted[-1] if self._sorted else _FIRST_EXPECTED

    def remaining(self, num_sampled: int, num_longer: int = 1) -> int:
        """Returns how many more tokens an answer of `num_sampled` tokens is expected to have, at least one.

        `num_longer` answers that have not ended are longer than all that is known."""
        if self._fixed:
            return max(1, self._fixed - num_sampled if num_sampled < self._fixed else num_sampled)
        longer = len(self._sorted) - bisect.bisect_right(self._sorted, num_sampled)
        if longer:
            expected = -(-self._sums[longer] // longer) - num_sampled
        elif self._sorted or num_sampled >= _FIRST_EXPECTED:
            expected = num_sampled * max(1, num_longer)
        else:
            expected = _FIRST_EXPECTED - num_sampled
        return max(_MIN_REMAINING, expected)

    def record(self, num_sampled: int, *, was_cut: bool) -> None:
        """Learns from an answer that has ended.

        One that was cut off, by its own `max_tokens` for instance, would have become longer: it counts as no shorter
        than what was expected, or short limits of some requests would make those of others seem short."""
        length = max(num_sampled, self.remaining(0)) if was_cut else num_sampled
        if len(self._recent) == _WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        bisect.insort(self._sorted, length)
        self._sums = [0, *accumulate(reversed(self._sorted))]
