"""The deadlines of HTTP connections."""

import asyncio
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The times that a server waits for its clients."""

    head_s: float = 10.0
    """For a complete head, from its first byte; for the first request of a connection, from the connection's start."""
    keep_alive_s: float = 30.0
    """For the first byte of another request."""
    slow_reader_s: float = 30.0
    """For a client to read more of a response that exceeds the buffers."""
    linger_s: float = 2.0
    """For a client to read why it was refused: it may still be sending, and would not get to read it if the connection
    were cut."""


class Deadline:
    """At most one pending timeout, for one purpose."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._purpose = ""

    def start(self, purpose: str, delay_s: float, expire: Callable[[], None]) -> None:
        """Starts a timeout, replacing a pending one unless that has the same purpose: then it keeps running."""
        if self._timer is None or purpose != self._purpose:
            self.cancel()
            self._purpose = purpose
            self._timer = self._loop.call_later(delay_s, self._expire, expire)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, expire: Callable[[], None]) -> None:
        self._timer = None
        expire()
