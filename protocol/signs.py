"""Asks the broker again and again whether it is there, so that `Bus.heard_at` tells when it last was."""

import asyncio
import contextlib

from protocol.bus import Bus

_PING_S = 0.5


async def ask_for_signs(bus: Bus, timeout_s: float) -> None:
    """Has the broker say something twice a second, also when nobody else speaks; until cancelled."""
    while True:
        with contextlib.suppress(TimeoutError, ConnectionError):
            await bus.flush(timeout_s)
        await asyncio.sleep(_PING_S)
