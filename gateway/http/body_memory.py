"""Limits the memory for large bodies, from their receipt to the end of their requests."""

import asyncio
import contextlib
from collections.abc import Iterator

from tokenbus.gateway.http.http_errors import OVERLOADED, ApiError
from tokenbus.protocol.process.memory import trim_heap

_LARGE_BODIES = 32
"""The number of maximum-size bodies that fit at a time."""
_TRIM_DELAY_S = 0.5
"""The delay after a large body; by then nothing refers to it any more."""
_SMALL_BYTES = 1024 * 1024
"""This much of each body doesn't count, so that some clients' large bodies can't cause others' ordinary requests to be
refused."""


class BodyMemory:
    """The total bytes that open requests may have beyond a mebibyte each."""

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
        """Yields the account of one request's body, released at the end of the block."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.counted_bytes
            if held.counted_bytes and self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def add(self, num_bytes: int) -> None:
        """Raises ApiError if there is no room for this many more bytes."""
        if self.held_bytes + num_bytes > self._max_bytes:
            raise ApiError(OVERLOADED)
        self.held_bytes += num_bytes

    def _trim(self) -> None:
        """Returns the memory of bodies to the system; the C library would keep it for the thread that parsed them."""
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
        """Records the receipt of this many more bytes. Raises ApiError if memory is short."""
        self._num_bytes += num_bytes
        more = max(0, self._num_bytes - _SMALL_BYTES) - self.counted_bytes
        self._memory.add(more)
        self.counted_bytes += more
