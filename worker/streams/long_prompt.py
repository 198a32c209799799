"""Decides when to log about a prompt that takes long to compute."""

from tokenbus.protocol.telemetry.backoff import BackoffTimer

FIRST_S = 2.0
"""A prompt that takes longer is logged after this time, again each time it doubles, and when it is computed."""


class LongPrompt:
    """One prompt, from the first report of its progress. Times are seconds of one monotonic clock."""

    __slots__ = ("_began_at", "_began_tokens", "_is_logged", "_timer")

    def __init__(self, computed_tokens: int, now: float) -> None:
        self._began_at = now
        self._began_tokens = computed_tokens
        self._timer = BackoffTimer(FIRST_S)
        self._is_logged = False

    def is_due(self, now: float, *, is_computed: bool) -> bool:
        """Returns whether to log now. The end is logged if anything was logged before."""
        if is_computed:
            is_due, self._is_logged = self._is_logged, False
            return is_due
        is_due = self._timer.is_due(now - self._began_at)
        self._is_logged |= is_due
        return is_due

    def seconds(self, now: float) -> float:
        """Returns the time since the first report."""
        return now - self._began_at

    def tokens_per_s(self, computed_tokens: int, now: float) -> float:
        """Returns the speed since the first report."""
        return (computed_tokens - self._began_tokens) / max(1e-3, self.seconds(now))
