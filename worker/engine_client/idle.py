"""Tracks whether an engine has any work, and since when it has none."""

import asyncio
import time


class Idle(asyncio.Event):
    """An event that is set while there is no work."""

    def __init__(self) -> None:
        super().__init__()
        self.since: float | None = None
        """When the last work ended; None while there is any."""
        self.set()

    def set(self) -> None:
        """Marks the engine idle."""
        if not self.is_set():
            self.since = time.monotonic()
        super().set()

    def clear(self) -> None:
        """Marks the engine busy."""
        self.since = None
        super().clear()
