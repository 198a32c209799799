"""The tokens and blocks that sequences are expected to have in the end, judging by the lengths of recent answers.

`max_tokens` says little: agents ask for thousands of tokens and use a hundred. The lengths of this model's recent
answers say more. For an answer that already has n tokens, only those that became longer than n are informative:

    recent lengths    60   70   90   200   240        n = 80: (90 + 200 + 240) / 3 - 80 = 97 more are expected

An answer longer than all of them is expected to double in length, if it is the only one. Several such answers show that
answers have become longer: if k of them have n tokens each and none has ended, k * n tokens are expected between two
ends, and as many more of each. (That is the mean of an exponential distribution, estimated from censored observations,
as if one of them ended now.)
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate

from tokenbus.worker.engine.scheduling.sequence import Sequence

_WINDOW = 64
"""The number of answers remembered."""
_FIRST_EXPECTED = 256
"""The expected tokens of an answer before any has ended."""
_MIN_REMAINING = 64
"""At least this many more tokens are expected of any answer, so that the next few steps have room."""


class AnswerLengths:
    """Learns how long answers become. With `fixed` above 0, all are expected to have that many tokens."""

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
        """The longest known answer, in tokens."""
        return self._sorted[-1] if self._sorted else _FIRST_EXPECTED

    def remaining(self, num_sampled: int, num_longer: int = 1) -> int:
        """Returns how many more tokens, at least one, an answer of `num_sampled` tokens is expected to have.

        `num_longer` unfinished answers are longer than all known ones."""
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
        """Learns from a finished answer.

        One that was cut off, for instance by its own `max_tokens`, would have become longer: it counts as no shorter
        than expected, or the short limits of some requests would make others' answers seem short."""
        length = max(num_sampled, self.remaining(0)) if was_cut else num_sampled
        if len(self._recent) == _WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        bisect.insort(self._sorted, length)
        self._sums = [0, *accumulate(reversed(self._sorted))]


class Expectation:
    """Estimates the tokens and blocks of one engine's sequences. `num_blocks` returns the blocks that tokens take.

    The remaining part of an answer may be doubled several times, where an estimate must not be too low again."""

    def __init__(self, expected_tokens: int, num_blocks: Callable[[int], int]) -> None:
        self._answer_lengths = AnswerLengths(expected_tokens)
        self._num_blocks = num_blocks
        self._num_longer = 0
        """Sequences whose answers are longer than all known ones."""

    def __repr__(self) -> str:
        return f"<Expectation, {self._answer_lengths!r}>"

    @property
    def answer_tokens(self) -> int:
        """The expected tokens of an answer."""
        return self._answer_lengths.remaining(0)

    def record(self, sequence: Sequence, *, was_cut: bool) -> None:
        """Learns from a finished answer; `was_cut` says whether its own limit ended it."""
        self._answer_lengths.record(sequence.num_sampled, was_cut=was_cut)

    def observe(self, sequences: Iterable[Sequence]) -> None:
        """Records the unfinished answers."""
        longest = self._answer_lengths.longest
        self._num_longer = sum(one.num_sampled >= longest for one in sequences)

    def tokens(self, sequence: Sequence, doublings: int = 0) -> int:
        """Returns the tokens that a sequence is expected to have in the end."""
        remaining = self._answer_lengths.remaining(sequence.num_sampled, self._num_longer) << doublings
        return min(sequence.max_num_tokens, sequence.num_tokens + remaining)

    def blocks(self, sequence: Sequence) -> int:
        """Returns the blocks that a sequence is expected to have in the end."""
        return self._num_blocks(self.tokens(sequence))

    def reserved_blocks(self, sequence: Sequence, doublings: int = 0) -> int:
        """Returns the blocks that a running sequence is expected to use beyond those it has."""
        return max(0, self._num_blocks(self.tokens(sequence, doublings)) - sequence.kv.num_blocks)
