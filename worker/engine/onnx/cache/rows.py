"""Assigns lanes to rows of the cache: those that decode together must be adjacent, from row 0 on.

    rows    | 0 1 2        | 3 4         | 5   6   7   8                    |
    lanes   | decode (one  | decode (the | prompts, cached prefixes, empty  |
            |  group)      |  next)      |

A batch is a run of rows without gaps, since even an empty row in it costs the work of a row. A lane that starts or
stops decoding costs a copy or two; an empty lane changes rows for free (decision 0029)."""

from collections.abc import Sequence as Listing
from typing import NamedTuple


class RowCopy(NamedTuple):
    """The first `num_tokens` tokens of row `source` are copied to row `target`."""

    source: int
    target: int
    num_tokens: int


class RowTable:
    """The rows of `num_lanes` lanes, and a spare row after them through which two full rows are exchanged.

    `lengths` are those of the lanes, in tokens; the code that computes tokens updates them."""

    def __init__(self, num_lanes: int, lengths: Listing[int]) -> None:
        self._row_of = list(range(num_lanes))
        self._lane_at = list(range(num_lanes))
        self._lengths = lengths
        self.spare = num_lanes

    def __repr__(self) -> str:
        return f"<RowTable {self._lane_at}>"

    def row_of(self, lane: int) -> int:
        return self._row_of[lane]

    def lane_at(self, row: int) -> int:
        """Returns the lane of a row; the spare row has none, which is one more than the last."""
        return self._lane_at[row] if row != self.spare else self.spare

    def claim_first_free_row(self, lane: int) -> None:
        """Moves an empty lane to the first empty row, because the sequence in it will decode in the first rows."""
        assert not self._lengths[lane], lane
        first = next(row for row, other in enumerate(self._lane_at) if not self._lengths[other])
        if first < self._row_of[lane]:
            self.swap(lane, self._lane_at[first])

    def swap(self, one: int, other: int) -> None:
        """Exchanges the rows of two lanes; each then has the other's contents."""
        a, b = self._row_of[one], self._row_of[other]
        self._row_of[one], self._row_of[other] = b, a
        self._lane_at[a], self._lane_at[b] = other, one

    def gather(self, groups: Listing[Listing[int]]) -> list[RowCopy]:
        """Moves groups of lanes to the first rows, one group after another. Returns the necessary copies, in order."""
        copies: list[RowCopy] = []
        first = 0
        for lanes in groups:
            copies += self._gather(lanes, range(first, first + len(lanes)))
            first += len(lanes)
        return copies

    def _gather(self, lanes: Listing[int], rows: range) -> list[RowCopy]:
        wanted = set(lanes)
        assert len(wanted) == len(lanes), lanes
        # The number of these rows held by others equals the number of wanted lanes outside them.
        holes = [row for row in rows if self._lane_at[row] not in wanted]
        outside = [lane for lane in lanes if self._row_of[lane] not in rows]
        return [copy for hole, lane in zip(holes, outside, strict=True) for copy in self._move(lane, hole)]

    def check_integrity(self) -> None:
        assert sorted(self._row_of) == list(range(len(self._row_of))), self
        assert all(self._lane_at[row] == lane for lane, row in enumerate(self._row_of)), self

    def _move(self, lane: int, row: int) -> list[RowCopy]:
        other, left = self._lane_at[row], self._row_of[lane]
        moved = RowCopy(left, row, self._lengths[lane])
        if not self._lengths[other]:
            self.swap(lane, other)
            return [moved]
        # The row is occupied: its lane moves to the last empty row, or swaps through the spare row.
        empty = next((last for last in reversed(self._lane_at) if not self._lengths[last]), None)
        if empty is None:
            self.swap(lane, other)
            length = self._lengths[other]
            return [RowCopy(row, self.spare, length), moved, RowCopy(self.spare, left, length)]
        out = RowCopy(row, self._row_of[empty], self._lengths[other])
        self.swap(other, empty)
        self.swap(lane, empty)
        return [out, moved]
