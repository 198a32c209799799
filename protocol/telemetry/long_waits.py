"""Decides when long waits are logged: a single one ever more rarely, and those of many requests together."""

from collections.abc import Iterator
from typing import NamedTuple

FIRST_S = 5.0
"""The default of `--slow-wait-s`."""
LOG_INTERVAL_S = 1.0
"""The least time between two lines about the same kind of wait."""


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


class LongWaits(NamedTuple):
    """Waits of one kind since the last line about it."""

    waits_for: str
    num_waits: int
    waited_s: float
    """The longest of them, and which request's it was."""
    request_id: str
    attempt: int
    worker_id: str | None
    model: str


class WaitLog:
    """The waits not yet logged, by kind."""

    def __init__(self) -> None:
        self._waits: dict[str, LongWaits] = {}
        self._logged_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<WaitLog {sum(one.num_waits for one in self._waits.values())} waits>"

    def add(self, wait: LongWaits) -> None:
        """Adds waits to those of the same kind."""
        known = self._waits.get(wait.waits_for)
        if known is not None:
            longest = max(known, wait, key=lambda one: one.waited_s)
            wait = longest._replace(num_waits=known.num_waits + wait.num_waits)
        self._waits[wait.waits_for] = wait

    def take_due(self, now: float) -> Iterator[LongWaits]:
        """Removes and returns the waits due to be logged. Call it several times a second."""
        for kind in list(self._waits):
            if now - self._logged_at.get(kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
                self._logged_at[kind] = now
                yield self._waits.pop(kind)
