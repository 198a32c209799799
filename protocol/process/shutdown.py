"""SIGINT and SIGTERM: the first asks a process to stop, the second stops it at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """The process was asked to stop before it was ready."""


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Within it Ctrl-C waits; a process that is started within it never gets one.

    The mask is for such processes. This one needs more: the threads of numerical libraries have masks of their own, and
    a signal that comes to one of them calls the handler in this thread all the same."""
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if has_come:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def on_stop(
    first: Callable[[], object],
    at_once: Callable[[], object] = lambda: None,
    signals: Iterable[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Within it the first signal calls `first` in the running loop; the next calls `at_once` and ends the process, even
    while the loop is busy. Afterwards signals do what they did before."""
    loop = asyncio.get_running_loop()
    num_came = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal num_came
        num_came += 1
        if num_came > 1:
            with contextlib.suppress(Exception):  # nothing may keep the process from ending
                at_once()
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        loop.add_signal_handler(number, first)  # a signal wakes the loop only where the loop has a handler
        signal.signal(number, count)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises StoppedError, and cancels it, when `stop` is set before it is done."""
    stopped, working = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise StoppedError
    finally:
        for task in (stopped, working):
            task.cancel()
        await asyncio.gather(stopped, working, return_exceptions=True)
