"""Asks the broker again and again whether it is there."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from protocol.bus import Bus

PING_S = 0.5


async def ask_for_signs(bus: Bus, timeout_s: float, heard: Callable[[float], None]) -> None:
    """Tells `heard` when it was asked, each time that the broker has answered within `timeout_s`; until cancelled."""
    while True:
        asked_at = time.monotonic()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await bus.flush(timeout_s)
            heard(asked_at)
        await asyncio.sleep(PING_S)
