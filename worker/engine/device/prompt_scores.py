"""Collects the log probabilities of prompts from the rows of logits of a step. The row after a token gives the log
probability of the next one:

    position      0    1    2    3
    token         A    B    C    D       D's row is the one from which the first token of the answer is sampled
    row           a    b    c    d
    gives         B    C    D

Rows are reduced at once: those of a thousand tokens would take 600 MB with a vocabulary of 150,000.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing

from tokenbus.worker.contract import prompt_logprobs
from tokenbus.worker.engine.scheduling.plan import ScoredTokens
from tokenbus.worker.engine.scheduling.sequence import Sequence

Pack = Callable[[int, Listing[int], int], bytes]
"""Takes the index of the first row, the tokens that it and the rows after it give, and a number of alternatives;
returns the packed log probabilities."""


class PromptScores:
    """The log probabilities of prompts that a runner has computed since they were last taken."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._scored: dict[int, ScoredTokens] = {}

    def __repr__(self) -> str:
        return f"<PromptScores of {len(self._scored)} sequences>"

    def add(self, sequence: Sequence, start: int, end: int, pack: Pack) -> None:
        """Adds what the rows after the tokens from `start` up to `end` give. Each call continues where the last one
        for this sequence has ended."""
        wanted = sequence.sampling.prompt_logprobs
        assert sequence.logprobs_from is not None
        assert wanted is not None
        count = min(wanted, self._vocab_size)
        kept = self._scored.get(sequence.seq_no) or ScoredTokens(sequence.seq_no, sequence.logprobs_from, 0, b"")
        if not kept.end:
            kept = kept.extended(1, prompt_logprobs.pack_first(sequence.token_ids[0], count))
        token_ids = sequence.token_ids[kept.end : min(end + 1, sequence.num_prompt)]
        if token_ids:
            assert kept.end > start, (sequence, kept.end, start)
            kept = kept.extended(len(token_ids), pack(kept.end - 1 - start, token_ids, count))
        self._scored[sequence.seq_no] = kept

    def discard(self, sequence: Sequence) -> None:
        """Forgets what a step gave for a sequence, since it has to be computed again."""
        self._scored.pop(sequence.seq_no, None)

    def take(self) -> list[ScoredTokens]:
        """Returns what was added since the last call."""
        if not self._scored:  # the usual case
            return []
        taken, self._scored = list(self._scored.values()), {}
        return taken
