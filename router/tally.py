"""What a router counts of its own work; pure."""

import math

_FADES_S = 10.0


class Tally:
    """Since the router started."""

    def __init__(self) -> None:
        self.decisions = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.refused_messages = 0
        self._recent = 0.0
        self._recent_at = 0.0

    def __repr__(self) -> str:
        return f"<Tally of {self.decisions} decisions, {self.predicted_hit_rate:.3f} expected to be cached>"

    def placed(self, prompt_tokens: int, predicted_tokens: int, now: float) -> None:
        """A request was placed where so many tokens of its prompt are expected to be cached."""
        self.decisions += 1
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens
        self._recent = self._recent * math.exp((self._recent_at - now) / _FADES_S) + 1.0
        self._recent_at = now

    def per_s(self, now: float) -> float:
        """Placements in a second, of late."""
        return self._recent * math.exp((self._recent_at - now) / _FADES_S) / _FADES_S

    @property
    def predicted_hit_rate(self) -> float:
        """Of all prompt tokens, those that were expected to be cached."""
        return self.predicted_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
