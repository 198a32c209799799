"""What a router counts of its own work; pure."""

from collections import deque

from tokenbus.router.fleet.decaying_rate import DecayingRate

_KEPT = 1_024
"""Choices whose times are remembered."""


class DecisionStats:
    """Since the router started."""

    def __init__(self) -> None:
        self.decisions = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.refused_messages = 0
        self._took_s: deque[float] = deque(maxlen=_KEPT)
        self._recent = DecayingRate()

    def __repr__(self) -> str:
        return f"<RouterStats of {self.decisions} decisions, {self.predicted_hit_rate:.3f} expected to be cached>"

    def record_placement(self, prompt_tokens: int, predicted_tokens: int, now: float) -> None:
        """A request was placed where so many tokens of its prompt are expected to be cached."""
        self.decisions += 1
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens
        self._recent.add(now)

    def record_decision_time(self, seconds: float) -> None:
        """A choice has taken so long, from a prompt's token ids to its booking."""
        self._took_s.append(seconds)

    def decision_percentiles_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the last choices, in microseconds."""
        times = sorted(self._took_s) or [0.0]
        return times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6

    def decisions_per_s(self, now: float) -> float:
        """Placements in a second, of late."""
        return self._recent.per_s(now)

    @property
    def predicted_hit_rate(self) -> float:
        """Of all prompt tokens, those that were expected to be cached."""
        return self.predicted_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
