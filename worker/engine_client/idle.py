"""Whether an engine has any work, and since when it has none."""

import asyncio
import time


class Idle(asyncio.Event):
    """Is set while there is no work."""

    def __init__(self) -> None:
        super().__init__()
        self.since: float | None = None
        """When the last work ended; None while there is any."""
        self.set()

    def set(self) -> None:
        """There is no work from now on, if there was any."""
        if not self.is_set():
            self.since = time.monotonic()
        super().set()

    def clear(self) -> None:
        """There is work from now on."""
        self.since = None
        super().clear()
