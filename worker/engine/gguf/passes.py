"""Divides a batch into passes, so that attention takes as little time as possible and no pass has more rows of logits
than the context has room for.

Usually each part of a batch has one row, that of its last token. Parts whose log probabilities of the prompt are wanted
have a row for each token:

    part      |-- cached --|---- no rows ----|======== rows ========|
    pieces                 |------------ first ------------|- next -|
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import NamedTuple

from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.row_tiles import Pass, RowTiles


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


class PiecePass(NamedTuple):
    """Pieces that are computed together."""

    pieces: list[Piece]
    padding: int = 0
    """The tokens to compute besides, whose results are not used."""


def to_passes(batch: Listing[ScheduledTokens], max_rows: int, tiles: RowTiles | None) -> list[PiecePass]:
    """Returns the passes that compute a batch, of which each has at most `max_rows` rows, and at most one piece of each
    part. The tiles are those of the device's attention; None if it has none."""
    passes = [Pass([*batch])] if tiles is None else tiles.divide(batch)
    divided: list[PiecePass] = []
    for parts, padding in passes:
        if all(part.first_row is None for part in parts):
            divided.append(PiecePass([Piece(part, part.start, part.end) for part in parts], padding))
        else:
            divided += [PiecePass(pieces) for pieces in _within_rows(parts, max_rows)]
    return divided


def _within_rows(parts: Iterable[ScheduledTokens], max_rows: int) -> list[list[Piece]]:
    """Those that decode come first, so that they all are in the first pass."""
    passes: list[list[Piece]] = [[]]
    left = max_rows
    for part in parts:
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
