"""What was just placed will be held soon: counted as held until the worker's own word must have come; pure."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tokenbus.router.placement.prefix_index import MatchLevel

PREDICTION_TTL_S = 5.0
"""How long a placed prefix is believed to be there, or on its way, without an event."""
MAX_BLOCKS = 1 << 18
"""Blocks of placements that are remembered at the same time; the oldest are forgotten first."""


class _Placed(NamedTuple):
    until: float
    row: int
    start: int
    """Leading blocks that were held there already."""
    hashes: Sequence[int]
    """Of the whole prompt."""


class Predictions:
    """Prefixes that were placed lately, by the places of the workers they went to.

    A placement is found by the first block that was not held yet. Hashes are chained, so how far another prompt goes
    along with it is found by halves."""

    def __init__(self) -> None:
        self._by_first: dict[int, list[_Placed]] = {}
        self._starts: dict[int, int] = {}
        """How many placements start at each depth."""
        self._placed: deque[_Placed] = deque()
        self._num_blocks = 0

    def __repr__(self) -> str:
        return f"<Predictions {len(self._placed)} placements, {self._num_blocks} blocks>"

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, row: int, hashes: Sequence[int], overlap_blocks: int, now: float) -> None:
        """A prompt of these blocks has gone to a worker that holds, or will, the first `overlap_blocks`."""
        if overlap_blocks >= len(hashes):
            return
        placed = _Placed(now + PREDICTION_TTL_S, row, overlap_blocks, hashes)
        self._placed.append(placed)
        self._by_first.setdefault(hashes[overlap_blocks], []).append(placed)
        self._starts[overlap_blocks] = self._starts.get(overlap_blocks, 0) + 1
        self._num_blocks += len(hashes)
        while self._num_blocks > MAX_BLOCKS:
            self._forget(self._placed.popleft())

    def expire(self, now: float) -> None:
        """Forgets what has been expected for long enough."""
        while self._placed and self._placed[0].until <= now:
            self._forget(self._placed.popleft())

    def match(self, hashes: Sequence[int], levels: Sequence[MatchLevel]) -> dict[int, int]:
        """How far the leading blocks will reach at each worker that is expected to hold more than it is known to.

        `levels` say what is known."""
        reached: dict[int, int] = {}
        for start in self._starts:
            if start >= len(hashes):
                continue
            for placed in self._by_first.get(hashes[start], ()):
                end = _common(placed.hashes, hashes, start)
                if end > reached.get(placed.row, 0) and end > _known(levels, placed.row):
                    reached[placed.row] = end
        return reached

    def remove_worker(self, row: int) -> None:
        """That worker is gone: nothing is expected of it any more."""
        gone = [one for one in self._placed if one.row == row]
        self._placed = deque(one for one in self._placed if one.row != row)
        for one in gone:
            self._forget(one)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        assert sorted(map(id, self._placed)) == sorted(id(one) for found in self._by_first.values() for one in found)
        assert all(one.hashes[one.start] == first for first, found in self._by_first.items() for one in found)
        assert sum(self._starts.values()) == len(self._placed)
        assert {one.start for one in self._placed} == self._starts.keys()
        assert self._num_blocks == sum(len(one.hashes) for one in self._placed) <= MAX_BLOCKS

    def _forget(self, placed: _Placed) -> None:
        self._num_blocks -= len(placed.hashes)
        first = placed.hashes[placed.start]
        found = self._by_first[first]
        del found[next(at for at, one in enumerate(found) if one is placed)]
        if not found:
            del self._by_first[first]
        self._starts[placed.start] -= 1
        if not self._starts[placed.start]:
            del self._starts[placed.start]


def _common(one: Sequence[int], other: Sequence[int], low: int) -> int:
    """How many leading blocks two prompts have in common, of which `low + 1` are known to be."""
    high = min(len(one), len(other))
    low += 1
    if one[high - 1] == other[high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle
    return low


def _known(levels: Sequence[MatchLevel], row: int) -> int:
    return next((level.overlap_blocks for level in levels if level.worker_bits >> row & 1), 0)
