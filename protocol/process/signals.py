"""Handles signals: the first SIGINT or SIGTERM asks a process to stop, the second ends it at once (decision 0034), and
SIGHUP reloads its settings."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from tokenbus.protocol import late_logger, tasks

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = (signal.SIGHUP,) if sys.platform != "win32" else ()
"""The signal of a terminal that is closed, where there is one."""
_APPLY_TIMEOUT_S = 10.0
"""The time limit for applying new settings: otherwise one that hangs would block every later reload."""


class StoppedError(Exception):
    """The process was asked to stop before it was ready."""


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Defers Ctrl-C until the end of the block; processes started within the block never get it.

    Child processes inherit the signal mask. For this process the mask is not enough: numerical libraries have threads
    with masks of their own, and a signal that reaches one of them still calls Python's handler in the main thread."""
    was_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        # unblocked first: a pending signal must be noted, or it would arrive in addition to the one raised below
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if was_interrupted:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def on_stop(
    first: Callable[[], object],
    at_once: Callable[[], object] = lambda: None,
    signals: Iterable[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Within the block, the first signal calls `first` in the running loop, and the second calls `at_once` and ends the
    process, even while the loop is busy. Afterwards the previous handlers are restored."""
    loop = asyncio.get_running_loop()
    num_signals, has_handlers = 0, sys.platform != "win32"

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1 and not has_handlers:
            loop.call_soon_threadsafe(first)
        if num_signals > 1:
            with contextlib.suppress(Exception):  # nothing may prevent the process from ending
                at_once()
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        if has_handlers:
            loop.add_signal_handler(number, first)  # on Unix a signal wakes the loop only where this has a handler
        signal.signal(number, count)
    try:
        yield
    finally:
        for number, handler in before.items():
            if has_handlers:
                loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or cancels it and raises StoppedError when `stop` is set first."""
    stopped, working = tasks.awaited(stop.wait()), tasks.awaited(work)
    try:
        await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise StoppedError
    finally:
        for task in (stopped, working):
            task.cancel()
        await asyncio.gather(stopped, working, return_exceptions=True)


Settings = TypeVar("Settings")
Apply = Callable[[Settings], Awaitable[None] | None]


def on_hangup(read_settings: Callable[[], Settings], apply: Apply[Settings]) -> None:
    """From now on, each SIGHUP calls `read_settings` and passes the result to `apply`.

    If `read_settings` raises ValueError, nothing changes. Reloads never overlap, so the settings read last are applied
    last; several signals during one reload cause one more."""
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    tasks.background("reload", _reload(requested, read_settings, apply))
    loop.add_signal_handler(signal.SIGHUP, requested.set)


async def _reload(requested: asyncio.Event, read_settings: Callable[[], Settings], apply: Apply[Settings]) -> None:
    log = late_logger.get_logger()
    while True:
        await requested.wait()
        requested.clear()  # before reading: a signal that arrives during the reload must trigger another one
        try:
            settings = read_settings()
        except ValueError as error:
            log.error("settings_refused", error=str(error))
            continue
        try:
            async with asyncio.timeout(_APPLY_TIMEOUT_S):
                applying = apply(settings)
                if applying is not None:
                    await applying
        except Exception as error:  # whatever it was, the process keeps serving, and the next reload may succeed
            log.error("settings_not_applied", error=f"{type(error).__name__}: {error}")
