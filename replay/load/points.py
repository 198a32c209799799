"""The points of a sweep: how load is offered in one run; pure."""

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
    CONCURRENCY = "concurrency"
    """So many clients, each of which asks again once it has its answer."""
    RATE = "rate"
    """So many requests a second, whatever comes back."""
    SPEEDUP = "speedup"
    """The trace's own times, so many times faster."""


_WORDS = {Kind.CONCURRENCY: "{:g} at a time", Kind.RATE: "{:g} requests/s", Kind.SPEEDUP: "{:g} × the trace's speed"}


class Point(NamedTuple):
    kind: Kind
    value: float

    def __str__(self) -> str:
        return _WORDS[self.kind].format(self.value)
