"""Averages of what has happened recently."""

import math

_DECAY_S = 10.0
"""After this time an event still counts for about a third."""


class MovingAverage:
    """An exponentially weighted mean in which each new value has `weight`: about the last 1 / `weight` count."""

    def __init__(self, weight: float) -> None:
        self.value: float | None = None
        """The mean; None before the first value."""
        self._weight = weight

    def __repr__(self) -> str:
        return f"<MovingAverage {self.value}>"

    def add(self, value: float) -> None:
        """Takes a new value into the mean."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)


class DecayingRate:
    """Events per second, in which each event counts less the longer ago it was."""

    def __init__(self) -> None:
        self._count = 0.0
        self._counted_at = 0.0

    def __repr__(self) -> str:
        return f"<DecayingRate {self._count:.1f} at {self._counted_at:.1f} s>"

    def add(self, now: float) -> None:
        """Counts one event."""
        self._count = self._count_at(now) + 1.0
        self._counted_at = now

    def per_s(self, now: float) -> float:
        """Returns events per second."""
        return self._count_at(now) / _DECAY_S

    def _count_at(self, now: float) -> float:
        return self._count * math.exp((self._counted_at - now) / _DECAY_S)
