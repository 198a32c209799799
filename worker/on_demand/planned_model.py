"""One model of a load plan: its state, demand and use."""

import enum

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine.memory.need import MemoryNeed

LINGER_S = 0.2
"""A model that has been idle for less than this is not unloaded: its clients may be about to send more requests."""
_FIRST_USE_S = 2.0
"""The same for a model that was loaded and not yet used: the requests that it was loaded for are on their way."""


class LoadState(enum.StrEnum):
    """The states of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class PlannedModel:
    """One model: its state, demand and use."""

    def __init__(self) -> None:
        self.state = LoadState.UNLOADED
        self.need: MemoryNeed | None = None
        self.wanted_since: float | None = None
        self.wanted_at = 0.0
        """When it was last requested."""
        self.idle_since: float | None = None
        """When its last request ended; None while there are any."""
        self.was_used = False
        """Whether it has had a request since it was loaded."""
        self.failure: errors.Error | None = None
        self.failed_at = 0.0

    def idle_s(self, now: float) -> float:
        """Returns how long it has been unused."""
        return now - self.idle_since if self.state is LoadState.LOADED and self.idle_since is not None else 0.0

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, or will take."""
        assert self.need is not None
        return self.need.total_bytes

    def is_idle(self, now: float) -> bool:
        """Whether it may be unloaded now."""
        return self.state is LoadState.LOADED and self.idle_s(now) >= (LINGER_S if self.was_used else _FIRST_USE_S)
