"""Aggregates long waits of requests, so that an overload logs one line a second rather than one per request."""

from collections.abc import Iterator
from typing import NamedTuple

LOG_INTERVAL_S = 1.0
"""The least time between two lines about the same kind of wait."""


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
