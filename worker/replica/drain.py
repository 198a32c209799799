"""A worker's drain: whether one was requested, and how long its streams may take to finish and to be moved."""

import asyncio
import contextlib
from collections.abc import Awaitable


class Drain:
    """May be requested several times: the latest durations count, even while they are running."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._grace_s: float | None = None
        self._handover_s: float | None = None
        self._timeout: asyncio.Timeout | None = None
        """Ends the current phase, which began at `_began_at`."""
        self._began_at = 0.0
        self._is_handing_over = False

    def __repr__(self) -> str:
        return f"<Drain requested={self.requested.is_set()}>"

    def request(self, grace_s: float | None = None, handover_s: float | None = None) -> None:
        """Asks the worker to leave. A time that is None stays as it was: initially the worker's own."""
        self._grace_s = self._grace_s if grace_s is None else grace_s
        self._handover_s = self._handover_s if handover_s is None else handover_s
        self.requested.set()
        named_s = self._handover_s if self._is_handing_over else self._grace_s
        if self._timeout is not None and not self._timeout.expired() and named_s is not None:
            self._timeout.reschedule(self._began_at + named_s)

    def handover_s(self, own_s: float) -> float:
        """Returns the time for moving streams, which is `own_s` unless the request named another."""
        return own_s if self._handover_s is None else self._handover_s

    async def finish(self, work: Awaitable[None], own_s: float) -> None:
        """Waits until running streams have finished, for at most `own_s` unless the request named another time."""
        await self._wait_for(work, own_s if self._grace_s is None else self._grace_s)

    async def hand_over(self, work: Awaitable[None], own_s: float) -> None:
        """Waits until the other streams have moved, for at most `own_s` unless the request named another time."""
        self._is_handing_over = True
        await self._wait_for(work, self.handover_s(own_s))

    async def _wait_for(self, work: Awaitable[None], limit_s: float) -> None:
        self._began_at = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(limit_s) as self._timeout:
                    await work
            finally:
                self._timeout = None
