"""How often something has happened of late; pure."""

import math

_DECAY_S = 10.0
"""After so long a third of what happened still counts."""


class DecayingRate:
    """A count of events that forgets the old ones gradually."""

    def __init__(self) -> None:
        self._recent = 0.0
        self._recent_at = 0.0

    def __repr__(self) -> str:
        return f"<DecayingRate {self._recent:.1f} at {self._recent_at:.1f} s>"

    def add(self, now: float) -> None:
        """It has happened once more."""
        self._recent = self._at(now) + 1.0
        self._recent_at = now

    def per_s(self, now: float) -> float:
        """Times in a second."""
        return self._at(now) / _DECAY_S

    def _at(self, now: float) -> float:
        return self._recent * math.exp((self._recent_at - now) / _DECAY_S)
