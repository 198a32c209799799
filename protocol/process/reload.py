"""Settings that change while a process serves: read again on SIGHUP."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

Settings = TypeVar("Settings")
_APPLY_TIMEOUT_S = 10.0
"""An adoption that takes longer is given up, or the next could never come."""
Apply = Callable[[Settings], Awaitable[None] | None]


def on_hangup(read_settings: Callable[[], Settings], apply: Apply[Settings]) -> None:
    """From now on SIGHUP has `apply` given what `read_settings` reads. Where that raises ValueError all stays as it is.

    What is read last is adopted last: while one adoption goes on the next waits, and several signals are one."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.create_task(_reload(asked, read_settings, apply))
    loop.add_signal_handler(signal.SIGHUP, asked.set)


async def _reload(asked: asyncio.Event, read_settings: Callable[[], Settings], apply: Apply[Settings]) -> None:
    log = structlog.get_logger()
    while True:
        await asked.wait()
        asked.clear()
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
        except Exception as error:  # whatever it was, the process serves on, and the next signal may do better
            log.error("settings_not_applied", error=f"{type(error).__name__}: {error}")
