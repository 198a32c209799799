"""Predicts where the blocks of newly placed requests will be, until the workers' own events report them.

Without this, requests with a common prefix that arrive together would be spread over all workers, since none of them
holds it yet. Predictions are kept apart from the prefix index because they must expire."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tokenbus.router.placement.prefix_index import MatchLevel

PREDICTION_TTL_S = 5.0
"""The lifetime of a prediction."""
MAX_BLOCKS = 1 << 18
"""Blocks of all predictions together; beyond that the oldest prediction is discarded."""


class _Prediction(NamedTuple):
    until: float
    row: int
    start: int
    """Leading blocks that the worker already held."""
    hashes: Sequence[int]
    """The hashes of the whole prompt."""


class Predictions:
    """Recently placed prompts, by the rows of their workers.

    A prediction is found by its first block not yet held by the worker. Since hashes are chained, bisection then finds
    how many blocks another prompt has in common with it."""

    def __init__(self) -> None:
        self._by_first: dict[int, list[_Prediction]] = {}
        self._starts: dict[int, int] = {}
        """The number of predictions that start at each depth."""
        self._queue: deque[_Prediction] = deque()
        self._num_blocks = 0

    def __repr__(self) -> str:
        return f"<Predictions {len(self._queue)} prompts, {self._num_blocks} blocks>"

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, row: int, hashes: Sequence[int], overlap_blocks: int, now: float) -> None:
        """Predicts that a worker will hold these blocks, the first `overlap_blocks` of which it holds or is predicted
        to hold."""
        if overlap_blocks >= len(hashes):
            return
        prediction = _Prediction(now + PREDICTION_TTL_S, row, overlap_blocks, hashes)
        self._queue.append(prediction)
        self._by_first.setdefault(hashes[overlap_blocks], []).append(prediction)
        self._starts[overlap_blocks] = self._starts.get(overlap_blocks, 0) + 1
        self._num_blocks += len(hashes)
        while self._num_blocks > MAX_BLOCKS:
            self._forget(self._queue.popleft())

    def expire(self, now: float) -> None:
        """Discards old predictions."""
        while self._queue and self._queue[0].until <= now:
            self._forget(self._queue.popleft())

    def match(self, hashes: Sequence[int], levels: Sequence[MatchLevel]) -> dict[int, int]:
        """Returns, by row, how many leading blocks of a prompt each worker will hold, for workers that will hold more
        than the prefix index's `levels` say."""
        reached: dict[int, int] = {}
        for start in self._starts:
            if start >= len(hashes):
                continue
            for prediction in self._by_first.get(hashes[start], ()):
                end = _common(prediction.hashes, hashes, start)
                if end > reached.get(prediction.row, 0) and end > _known(levels, prediction.row):
                    reached[prediction.row] = end
        return reached

    def remove_worker(self, row: int) -> None:
        """Discards all predictions for a removed worker."""
        gone = [one for one in self._queue if one.row == row]
        self._queue = deque(one for one in self._queue if one.row != row)
        for one in gone:
            self._forget(one)

    def check_integrity(self) -> None:
        """Asserts that the three tables describe the same predictions."""
        assert sorted(map(id, self._queue)) == sorted(id(one) for found in self._by_first.values() for one in found)
        assert all(one.hashes[one.start] == first for first, found in self._by_first.items() for one in found)
        assert sum(self._starts.values()) == len(self._queue)
        assert {one.start for one in self._queue} == self._starts.keys()
        assert self._num_blocks == sum(len(one.hashes) for one in self._queue) <= MAX_BLOCKS

    def _forget(self, prediction: _Prediction) -> None:
        self._num_blocks -= len(prediction.hashes)
        first = prediction.hashes[prediction.start]
        found = self._by_first[first]
        del found[next(at for at, one in enumerate(found) if one is prediction)]
        if not found:
            del self._by_first[first]
        self._starts[prediction.start] -= 1
        if not self._starts[prediction.start]:
            del self._starts[prediction.start]


def _common(one: Sequence[int], other: Sequence[int], low: int) -> int:
    """Returns how many leading blocks two prompts have in common, given that it is at least `low + 1`."""
    high = min(len(one), len(other))
    low += 1
    if one[high - 1] == other[high - 1]:  # the whole shorter one: the usual case
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
