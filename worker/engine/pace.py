"""How many tokens a step may carry, so that it stays short: a cancel never waits behind a long prompt."""

_WEIGHT = 0.3
"""Of the newest step in the running estimate: a handful of steps follow a change of speed."""
_FEWEST_TO_LEARN_FROM = 8
"""Below this a step's time says more about its fixed cost than about its tokens."""


class Pace:
    """Learns how fast prompts are computed and bounds a step's tokens by `target_s` seconds."""

    def __init__(self, target_s: float, min_tokens: int, max_tokens: int) -> None:
        assert 0 < min_tokens <= max_tokens, (min_tokens, max_tokens)
        self._target_s = target_s
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tokens_per_s: float | None = None

    def __repr__(self) -> str:
        return f"<Pace {self._tokens_per_s or 0:.0f} tokens/s, {self.prefill_budget} a step>"

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens for the next step: few until the first steps have been timed."""
        if self._tokens_per_s is None:
            return self._min_tokens
        return max(self._min_tokens, min(self._max_tokens, int(self._tokens_per_s * self._target_s)))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step of `num_tokens` that took `seconds`."""
        if num_tokens < _FEWEST_TO_LEARN_FROM or seconds <= 0:
            return
        rate = num_tokens / seconds
        known = self._tokens_per_s
        self._tokens_per_s = rate if known is None else known + _WEIGHT * (rate - known)
