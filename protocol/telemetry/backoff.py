"""Decides when to log about a wait: after a first delay, and again each time the wait has doubled."""

FIRST_S = 5.0
"""The default of `--slow-wait-s`."""


class BackoffTimer:
    """Limits how often one wait is logged: the interval doubles each time."""

    __slots__ = ("_next_s",)

    def __init__(self, first_s: float) -> None:
        assert first_s > 0, first_s
        self._next_s = first_s

    def __repr__(self) -> str:
        return f"<BackoffTimer next after {self._next_s:g} s>"

    def is_due(self, waited_s: float) -> bool:
        """Returns whether to log now, after a wait of `waited_s`. If so, the next time is at no less than twice
        that."""
        if waited_s < self._next_s:
            return False
        while self._next_s <= waited_s:
            self._next_s *= 2
        return True
