"""The tokens and blocks that sequences are expected to have in the end, by what answers have used lately."""

from collections.abc import Callable, Iterable

from tokenbus.worker.engine.scheduling.answer_lengths import AnswerLengths
from tokenbus.worker.engine.scheduling.sequence import Sequence


class Expectation:
    """Expects tokens and blocks of the sequences of one engine. `num_blocks` returns the blocks that tokens take.

    The part of an answer that is yet to come may be doubled several times, for those who must not be wrong again."""

    def __init__(self, expected_tokens: int, num_blocks: Callable[[int], int]) -> None:
        self._answer_lengths = AnswerLengths(expected_tokens)
        self._num_blocks = num_blocks
        self._num_longer = 0
        """Sequences whose answers are longer than all that is known."""

    def __repr__(self) -> str:
        return f"<Expectation, {self._answer_lengths!r}>"

    @property
    def answer_tokens(self) -> int:
        """The tokens that an answer is expected to have."""
        return self._answer_lengths.remaining(0)

    def record(self, sequence: Sequence, *, was_cut: bool) -> None:
        """Learns from an answer that has ended; `was_cut` says whether its own limit has ended it."""
        self._answer_lengths.record(sequence.num_sampled, was_cut=was_cut)

    def observe(self, sequences: Iterable[Sequence]) -> None:
        """Notes which answers there are that have not ended."""
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
        """Returns the blocks that a running sequence is expected to use beyond those that it has."""
        return max(0, self._num_blocks(self.tokens(sequence, doublings)) - sequence.kv.num_blocks)
