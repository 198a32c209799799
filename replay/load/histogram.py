"""Histograms in bounded memory, for any number of values."""

import math
from collections.abc import Iterator

import msgspec

_GROWTH = 1.01
"""The ratio of neighbouring buckets: percentiles are accurate to 0.5 %."""
_SMALLEST, _LARGEST = 1e-3, 1e9
"""Values outside this range count in the outermost buckets, so there are at most 2,778 buckets."""
_DIGITS = 3


class LatencyStats(msgspec.Struct, frozen=True):
    """A distribution of times, in milliseconds; null if nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class LatencyHistogram:
    """Counts values by size. Mean and extremes are exact; percentiles are by nearest rank."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0.0
        self._min, self._max = math.inf, -math.inf
        self.count = 0

    def __repr__(self) -> str:
        return f"<LatencyHistogram of {self.count} in {len(self._counts)} buckets>"

    def add(self, value: float, times: int = 1) -> None:
        bucket = math.floor(math.log(min(max(value, _SMALLEST), _LARGEST), _GROWTH))
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self._total += value * times
        self._min, self._max = min(self._min, value), max(self._max, value)
        self.count += times

    def percentile(self, percent: float) -> float | None:
        """Returns the smallest value that at least this percentage of all values do not exceed; None without values."""
        return next((value for value, below in self.cumulative() if below * 100 >= percent - 1e-9), None)

    def cumulative(self) -> Iterator[tuple[float, float]]:
        """Yields the distribution: ascending values, each with the share of all values that do not exceed it."""
        below = 0
        for bucket in sorted(self._counts):
            below += self._counts[bucket]
            middle = _GROWTH ** (bucket + 0.5)
            yield min(max(middle, self._min), self._max), below / self.count

    def summary(self) -> LatencyStats:
        if not self.count:
            return LatencyStats(None, None, None, None, None)
        numbers = (self._total / self.count, *map(self.percentile, (50, 90, 99)), self._max)
        return LatencyStats(*(None if number is None else round(number, _DIGITS) for number in numbers))
