"""The times of an engine's steps, as its frontend sees them: whether one will never end, how fast prompts are computed.

An engine reports every step once it is computed. While it has work and reports nothing, the step in progress ages. A
fixed limit alone would kill large models on slow devices, so a step counts as stuck only when it is older than the
limit and also ten times older than the longest step so far."""

from tokenbus.protocol.moving_average import MovingAverage

_STUCK_FACTOR = 10
_SPEED_WEIGHT = 0.3
"""The newest step's weight in the prefill speed."""
_MIN_TOKENS = 32
"""The time of a step with fewer tokens is dominated by its fixed cost."""


class StepWatchdog:
    """Measures the step in progress. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._step_started_at = now
        self.longest_step_s = 0.0

    def __repr__(self) -> str:
        return f"<StepWatchdog longest {self.longest_step_s:.3f} s>"

    def restart(self, now: float) -> None:
        """Restarts measuring: an idle engine got work, or the frontend itself was frozen and missed reports."""
        self._step_started_at = now

    def step_reported(self, now: float, *, has_outputs: bool) -> None:
        """Notes the end of a step. One without outputs may have been cut short and does not count as the longest."""
        if has_outputs:
            self.longest_step_s = max(self.longest_step_s, self.age_s(now))
        self._step_started_at = now

    def age_s(self, now: float) -> float:
        """Returns the age of the step in progress, in seconds."""
        return now - self._step_started_at

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Returns whether the step in progress will never end."""
        return self.age_s(now) > max(timeout_s, _STUCK_FACTOR * self.longest_step_s)


class PrefillSpeed:
    """A moving average over steps that computed prompts."""

    def __init__(self) -> None:
        self._mean = MovingAverage(_SPEED_WEIGHT)

    @property
    def tokens_per_s(self) -> float | None:
        """None until a step has been timed."""
        return self._mean.value

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a step."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._mean.add(num_tokens / seconds)
