"""A thread with an event loop in which a client lives, for callers that have none."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tokenbus.client import errors
from tokenbus.client.client import Client

ResultT = TypeVar("ResultT")

_STOP_S = 3.0
"""Time for the last cancels to reach the broker. The thread is a daemon: it never keeps a process alive."""


class NoLoopError(RuntimeError):
    """The thread has ended, or is not in this process."""


class LoopThread:
    """Runs coroutines for other threads, any number of them at the same time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self._is_started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping: asyncio.Event | None = None
        self._giving_work = threading.Lock()
        self._takes_work = False
        """Whether what the loop gets now will end before the loop does. Guarded by the lock."""
        self._thread = threading.Thread(target=self._run, name="tokenbus client", daemon=True)

    def __repr__(self) -> str:
        return f"<LoopThread of {self._client!r}>"

    @classmethod
    def start(cls, client: Client) -> "LoopThread":
        """Starts the thread, and connects the client in it. Raises what that raises."""
        thread = cls(client)
        try:
            thread._thread.start()
            thread._is_started.wait()
            thread.run(client.__aenter__())
        except BaseException:
            thread.stop()
            raise
        return thread

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float | None = None) -> ResultT:
        """Returns the result of a coroutine. It is cancelled if the caller is interrupted, and after `timeout_s`.

        Raises what it raises, TimeoutError, and NoLoopError after the end of the thread and in a process that was
        forked from the thread's own."""
        if os.getpid() != self._pid:
            work.close()
            raise NoLoopError("this client belongs to the process that forked this one: make one in each process")
        with self._giving_work:
            if self._loop is None or not self._takes_work:
                work.close()
                raise NoLoopError("this client is closed")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(timeout_s)
        except concurrent.futures.CancelledError:  # the loop has ended
            raise errors.cancelled("the client was closed") from None
        except TimeoutError:
            if running.done():  # it is the request's own
                raise
            running.cancel()
            raise TimeoutError(f"the answer was not complete within {timeout_s:g} s: it is cancelled") from None
        except BaseException:  # Ctrl-C too
            running.cancel()
            raise

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Returns the result of a function that needs the event loop."""

        async def work() -> ResultT:
            return function()

        return self.run(work())

    def stop(self) -> None:
        """Closes the client and ends the thread. Idempotent."""
        if os.getpid() != self._pid or self._loop is None or self._is_stopping is None:
            return
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._is_stopping.set)
            except RuntimeError:  # it was closed just now
                return
        if threading.current_thread() is not self._thread:  # a destructor may run in any thread
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._is_started.set()  # also where no event loop could be made

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._takes_work = True
        self._is_started.set()
        try:
            await self._is_stopping.wait()
            await self._client.close()
        finally:
            with self._giving_work:
                self._takes_work = False
            await asyncio.sleep(0)  # what it got last becomes tasks, which are cancelled when it ends
