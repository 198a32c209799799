"""A few threads for what takes long, at which tenants take turns: who brings much of it delays only itself."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenbus.protocol.process import memory
from tokenbus.router.requests.fair_queue import FairQueue, QueuedRequest

ResultT = TypeVar("ResultT")

_UNBOUNDED = 1 << 62
"""Whoever waits here is one of the router's flights, which are bounded."""
_CHARS_PER_S = 100_000
"""By so much a text's turn is put off, so that a tenant's short texts need not wait for many long ones of its own."""
_CHARS_PER_TOKEN = 4
_LARGE_CHARS = 65_536
"""What is larger leaves memory behind that is worth giving back."""


class FairExecutor:
    """Runs functions on its threads, for tenants in turn, each tenant paying for the length of its texts."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = self._num_free = num_threads
        self._line = FairQueue(_UNBOUNDED, _UNBOUNDED)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._last: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Desk, {len(self._turns)} waiting, {self._num_free} of {self._num_threads} threads free>"

    async def run(
        self, key: str, tenant: str, arrived_at: float, num_chars: int, work: Callable[[], ResultT]
    ) -> ResultT:
        """What `work` returns or raises, when it has been its turn; `key` is of one call at a time."""
        await self._wait(
            QueuedRequest(key, tenant, arrived_at + num_chars / _CHARS_PER_S, num_chars // _CHARS_PER_TOKEN + 1)
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _tidied, work, num_chars)
        finally:
            self._give_up_turn()

    def close(self, last: Callable[[], None]) -> None:
        """Ends the threads, after `last`, when all that waits is done."""
        self._last = last
        self._next()

    async def _wait(self, waiting: QueuedRequest) -> None:
        turn = self._turns[waiting.key] = asyncio.get_running_loop().create_future()
        self._line.put(waiting)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if waiting.key in self._line:
                self._line.remove(waiting.key)
                del self._turns[waiting.key]
            else:  # its turn has come in the same moment
                self._give_up_turn()
            raise

    def _give_up_turn(self) -> None:
        self._num_free += 1
        self._next()

    def _next(self) -> None:
        while self._line and self._num_free:
            self._num_free -= 1
            turn = self._turns.pop(self._line.pop(0.0).key)
            if not turn.done():
                turn.set_result(None)
        if self._last is not None and self._num_free == self._num_threads:
            self._threads.submit(self._last)
            self._threads.shutdown(wait=False)
            self._last = None


def _tidied(work: Callable[[], ResultT], num_chars: int) -> ResultT:
    try:
        return work()
    finally:
        if num_chars > _LARGE_CHARS:
            memory.trim_heap()
