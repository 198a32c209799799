"""What was just placed will be held soon: counted as held until the worker's own word must have come; pure."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from router.index import Level

PREDICTED_S = 5.0
"""How long a placed prefix is believed to be there, or on its way, without an event."""
MOST_BLOCKS = 1 << 16
"""Blocks of placements that are remembered at the same time; the oldest are forgotten first."""


class _Placed(NamedTuple):
    until: float
    place: int
    hashes: Sequence[int]


class Predictions:
    """Prefixes that were placed lately, by the places of the workers they went to.

    Only blocks behind those that a worker is known to hold are remembered, each with the workers it is expected at and
    how many placements expect it there."""

    def __init__(self) -> None:
        self._expected: dict[int, dict[int, int]] = {}
        self._placed: deque[_Placed] = deque()
        self._num_blocks = 0

    def __repr__(self) -> str:
        return f"<Predictions {len(self._placed)} placements, {len(self._expected)} blocks>"

    def __len__(self) -> int:
        return len(self._expected)

    def put(self, place: int, hashes: Sequence[int], overlap_blocks: int, now: float) -> None:
        """A prompt of these blocks has gone to a worker that is known to hold the first `overlap_blocks`."""
        fresh = hashes[overlap_blocks:]
        if not fresh:
            return
        self._placed.append(_Placed(now + PREDICTED_S, place, fresh))
        self._num_blocks += len(fresh)
        for name in fresh:
            at = self._expected.setdefault(name, {})
            at[place] = at.get(place, 0) + 1
        while self._num_blocks > MOST_BLOCKS:
            self._forget_oldest()

    def tick(self, now: float) -> None:
        """Forgets what has been expected for long enough."""
        while self._placed and self._placed[0].until <= now:
            self._forget_oldest()

    def reach(self, hashes: Sequence[int], levels: Sequence[Level]) -> dict[int, int]:
        """How far the leading blocks will reach at each worker that is expected to hold more than it is known to.

        `levels` say what is known."""
        if not self._expected:
            return {}
        places: set[int] = set()
        for depth in {0, *(level.overlap_blocks for level in levels)}:
            if depth < len(hashes):
                places.update(self._expected.get(hashes[depth], ()))
        reached = {}
        for place in places:
            known = end = next((level.overlap_blocks for level in levels if level.places >> place & 1), 0)
            while end < len(hashes) and place in self._expected.get(hashes[end], ()):
                end += 1
            if end > known:
                reached[place] = end
        return reached

    def leave(self, place: int) -> None:
        """That worker is gone: nothing is expected of it any more."""
        kept = deque(one for one in self._placed if one.place != place)
        for one in self._placed:
            if one.place == place:
                self._forget(one)
        self._placed = kept

    def check_integrity(self) -> None:
        counted: dict[int, dict[int, int]] = {}
        for one in self._placed:
            for name in one.hashes:
                at = counted.setdefault(name, {})
                at[one.place] = at.get(one.place, 0) + 1
        assert counted == self._expected
        assert self._num_blocks == sum(len(one.hashes) for one in self._placed) <= MOST_BLOCKS

    def _forget_oldest(self) -> None:
        self._forget(self._placed.popleft())

    def _forget(self, placed: _Placed) -> None:
        self._num_blocks -= len(placed.hashes)
        for name in placed.hashes:
            at = self._expected[name]
            if at[placed.place] == 1:
                del at[placed.place]
                if not at:
                    del self._expected[name]
            else:
                at[placed.place] -= 1
