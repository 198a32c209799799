"""Divides a batch into passes, none of which has more rows of logits than the context has room for.

Usually each part of a batch has one row, that of its last token, and there is one pass. Parts whose log probabilities
of the prompt are wanted have a row for each token:

    part      |-- cached --|---- no rows ----|======== rows ========|
    pieces                 |------------ first ------------|- next -|
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from tokenbus.worker.engine.scheduling.plan import ScheduledTokens


class Piece(NamedTuple):
    """Consecutive tokens of a part, from `start` up to `end`, all of which one pass computes."""

    part: ScheduledTokens
    start: int
    end: int

    @property
    def share(self) -> ScheduledTokens:
        """The same as a share of a step."""
        if self.end - self.start == self.part.num_tokens:
            return self.part
        return ScheduledTokens(self.part.sequence, self.start, self.end - self.start)

    @property
    def token_ids(self) -> "array[int]":
        return self.part.sequence.token_ids[self.start : self.end]

    @property
    def num_rows(self) -> int:
        """The number of its last tokens that have a row of logits."""
        first = self.part.first_row
        return 1 if first is None or first >= self.end else self.end - max(first, self.start)

    @property
    def has_scores(self) -> bool:
        """Whether any of its rows gives a wanted log probability."""
        first = self.part.first_row
        return first is not None and first < self.end

    @property
    def samples(self) -> bool:
        """Whether a token is sampled from its last row."""
        return self.part.samples and self.end == self.part.end


def to_passes(batch: Iterable[ScheduledTokens], max_rows: int) -> list[list[Piece]]:
    """Returns the pieces of each pass, which has at most `max_rows` rows, and at most one piece of each part.

    Those that decode come first in a batch, so that they all are in the first pass."""
    passes: list[list[Piece]] = [[]]
    left = max_rows
    for part in batch:
        start, first = part.start, part.first_row
        while start < part.end:
            if not left:
                passes.append([])
                left = max_rows
            end = part.end if first is None else min(part.end, max(start, first) + left)
            piece = Piece(part, start, end)
            passes[-1].append(piece)
            left -= piece.num_rows
            start = end
    return passes
