"""Decides whether an engine's step will never end.

An engine reports every step once it is computed. While it has work and reports nothing, the step in progress ages. A
fixed limit alone would kill large models on slow devices, so a step counts as stuck only when it is older than the
limit and also ten times older than the longest step so far."""

_STUCK_FACTOR = 10


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
