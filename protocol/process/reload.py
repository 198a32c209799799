"""Reloads settings on SIGHUP, while a process serves."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tokenbus.protocol import tasks

Settings = TypeVar("Settings")
_APPLY_TIMEOUT_S = 10.0
"""The time limit for applying new settings: otherwise one that hangs would block every later reload."""
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
    log = structlog.get_logger()
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
