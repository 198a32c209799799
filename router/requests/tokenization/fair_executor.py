"""A small thread pool that serves tenants fairly: a tenant with much work only delays itself."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import structlog

from tokenbus.protocol.process import memory
from tokenbus.router.requests.queueing.fair_queue import FairQueue, QueuedRequest

ResultT = TypeVar("ResultT")

_UNBOUNDED = 1 << 62
"""The router's flights are bounded, and every job here belongs to one of them."""
_CHARS_PER_S = 100_000
"""A text is queued as if it had arrived later, by its length at this rate, so that a tenant's short texts need not wait
for its many long ones."""
_CHARS_PER_TOKEN = 4
_LARGE_CHARS = 65_536
"""Texts longer than this leave enough free heap to be worth returning to the system."""


class FairExecutor:
    """Runs functions on its threads, in the order of a fair queue in which the length of a text is its cost."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = self._num_free = num_threads
        self._queue = FairQueue(_UNBOUNDED, _UNBOUNDED)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._on_closed: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<FairExecutor, {len(self._turns)} waiting, {self._num_free} of {self._num_threads} threads free>"

    async def run(
        self, key: str, tenant: str, arrived_at: float, num_chars: int, work: Callable[[], ResultT]
    ) -> ResultT:
        """Calls `work` on a thread and returns or raises what it does. Only one call at a time may use a `key`."""
        await self._wait_turn(
            QueuedRequest(key, tenant, arrived_at + num_chars / _CHARS_PER_S, num_chars // _CHARS_PER_TOKEN + 1)
        )
        running = self._threads.submit(_run_and_trim, work, num_chars)
        running.add_done_callback(functools.partial(self._thread_is_free, asyncio.get_running_loop()))
        return await asyncio.wrap_future(running)

    def close(self, on_closed: Callable[[], None]) -> None:
        """Finishes what is queued, then calls `on_closed` on a thread, logs what it raises, and ends the threads."""
        self._on_closed = on_closed
        self._start_next()

    async def _wait_turn(self, job: QueuedRequest) -> None:
        turn = self._turns[job.key] = asyncio.get_running_loop().create_future()
        self._queue.enqueue(job)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if job.key in self._queue:
                self._queue.remove(job.key)
                del self._turns[job.key]
            else:  # cancelled in the loop turn in which it got its thread
                self._release_thread()
            raise

    def _thread_is_free(self, loop: asyncio.AbstractEventLoop, _: "Future[ResultT]") -> None:
        """Gives a thread to the next job once it is free, which may be a while after its job was cancelled."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits any more
            loop.call_soon_threadsafe(self._release_thread)

    def _release_thread(self) -> None:
        self._num_free += 1
        self._start_next()

    def _start_next(self) -> None:
        while self._queue and self._num_free:
            self._num_free -= 1
            turn = self._turns.pop(self._queue.pop(0.0).key)
            if not turn.done():
                turn.set_result(None)
        if self._on_closed is not None and self._num_free == self._num_threads:
            self._threads.submit(_close, self._on_closed)
            self._threads.shutdown(wait=False)
            self._on_closed = None


def _close(on_closed: Callable[[], None]) -> None:
    try:
        on_closed()
    except Exception as error:  # outermost frame: nothing awaits it
        structlog.get_logger().error("task_failed", task="close", exc_info=error)


def _run_and_trim(work: Callable[[], ResultT], num_chars: int) -> ResultT:
    try:
        return work()
    finally:
        if num_chars > _LARGE_CHARS:
            memory.trim_heap()
