"""When to say of something that it still waits: after a while, and each time that has doubled; pure."""

FIRST_S = 5.0
"""Unless a setting says otherwise."""


class BackoffTimer:
    """Of one wait: few lines, however long it takes."""

    __slots__ = ("_next_s",)

    def __init__(self, first_s: float) -> None:
        assert first_s > 0, first_s
        self._next_s = first_s

    def __repr__(self) -> str:
        return f"<BackoffTimer next after {self._next_s:g} s>"

    def is_due(self, waited_s: float) -> bool:
        """Whether a line is due now; it is then not due again before twice as long."""
        if waited_s < self._next_s:
            return False
        while self._next_s <= waited_s:
            self._next_s *= 2
        return True
