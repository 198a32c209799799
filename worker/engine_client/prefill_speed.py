"""Learns how fast an engine computes prompts."""

_WEIGHT = 0.3
"""The newest step's weight in the running estimate."""
_MIN_TOKENS = 32
"""The time of a step with fewer tokens is dominated by its fixed cost."""


class PrefillSpeed:
    """A moving average over steps that computed prompts."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def __repr__(self) -> str:
        return f"<PrefillSpeed {self.tokens_per_s or 0:.0f} tokens/s>"

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a step."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            rate = num_tokens / seconds
            known = self.tokens_per_s
            self.tokens_per_s = rate if known is None else known + _WEIGHT * (rate - known)
