"""Bounds the memory for large bodies, from their receipt to the end of their requests."""

import asyncio
import contextlib
from collections.abc import Iterator

from tokenbus.gateway.http.http_errors import OVERLOADED, ApiError
from tokenbus.protocol.process.memory import trim_heap

_LARGE_BODIES = 32
"""Bodies of the largest size that there may be at a time."""
_TRIM_DELAY_S = 0.5
"""After a large body; nothing refers to it any more by then."""
_SMALL_BYTES = 1024 * 1024
"""So much of each body doesn't count: large bodies of some can't have the ordinary requests of others refused."""


class BodyMemory:
    """The bytes that open requests may have beyond a mebibyte each, all together."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        """The size of one body."""
        self._max_bytes = _LARGE_BODIES * max_body_bytes
        self.held_bytes = 0
        self._trimming: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BodyMemory {self.held_bytes} of {self._max_bytes} bytes>"

    @contextlib.contextmanager
    def holding(self) -> Iterator["HeldBody"]:
        """Yields the account of one request's body, which is closed with the block."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.counted_bytes
            if held.counted_bytes and self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def add(self, num_bytes: int) -> None:
        """Raises ApiError if there is no room for so many more bytes."""
        if self.held_bytes + num_bytes > self._max_bytes:
            raise ApiError(OVERLOADED)
        self.held_bytes += num_bytes

    def _trim(self) -> None:
        """Returns the memory of bodies to the system; the C library keeps it for the thread that parsed them."""
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


class HeldBody:
    """The body of one request."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0
        self.counted_bytes = 0

    def __repr__(self) -> str:
        return f"<HeldBody {self._num_bytes} bytes>"

    def add(self, num_bytes: int) -> None:
        """Notes that so many more bytes have come. Raises ApiError if there is no memory for them."""
        self._num_bytes += num_bytes
        more = max(0, self._num_bytes - _SMALL_BYTES) - self.counted_bytes
        self._memory.add(more)
        self.counted_bytes += more
