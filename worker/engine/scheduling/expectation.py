"""The tokens and blocks that sequences are expected to have in the end, judging by recent answers."""

from collections.abc import Callable, Iterable

from tokenbus.worker.engine.scheduling.answer_lengths import AnswerLengths
from tokenbus.worker.engine.scheduling.sequence import Sequence


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
