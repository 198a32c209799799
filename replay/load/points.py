"""The points of a sweep: how load is offered in one run; pure."""

import enum
from typing import NamedTuple


class LoadKind(enum.StrEnum):
    CONCURRENCY = "concurrency"
    """So many clients, each of which asks again once it has its answer."""
    RATE = "rate"
    """So many requests a second, whatever comes back."""
    SPEEDUP = "speedup"
    """The trace's own times, so many times faster."""


_LABELS = {
    LoadKind.CONCURRENCY: "{:g} at a time",
    LoadKind.RATE: "{:g} requests/s",
    LoadKind.SPEEDUP: "{:g} × the trace's speed",
}


class LoadPoint(NamedTuple):
    kind: LoadKind
    value: float

    def __str__(self) -> str:
        return _LABELS[self.kind].format(self.value)
