"""Settings that change while a process serves: read again on SIGHUP."""

import asyncio
import signal
from collections.abc import Callable
from typing import TypeVar

import structlog

Settings = TypeVar("Settings")


def on_hangup(again: Callable[[], Settings], adopt: Callable[[Settings], None]) -> None:
    """From now on SIGHUP has `adopt` given what `again` reads. Where that raises ValueError all stays as it is."""
    log = structlog.get_logger()

    def reread() -> None:
        try:
            settings = again()
        except ValueError as error:
            log.error("settings_refused", error=str(error))
        else:
            adopt(settings)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reread)
