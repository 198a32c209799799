"""Measures how soon a broker drops frozen connections, by the interval between its PINGs to an idle one.

A broker keeps giving requests to a frozen router until it drops its connection, and none of them is answered. It drops
a connection that has not answered `ping_max` PINGs, sent every `ping_interval`: by default that takes minutes. A client
can observe only the interval, and only while it sends nothing itself."""

import asyncio
import contextlib
import time
from typing import Any

from tokenbus.protocol import late_logger
from tokenbus.protocol.bus.nats_client import OPTIONS, HardenedClient
from tokenbus.protocol.bus.settings import BusSettings

LIMIT_S = 2.0
"""The longest acceptable interval: with two missed PINGs, a frozen router is dropped within six seconds."""
_PATIENCE_S = 6.0
"""A broker sends the first PING at most two seconds after a connect, regardless of its interval."""
_SILENT: dict[str, Any] = {"ping_interval": 3_600, "allow_reconnect": False}


class _Listener(HardenedClient):
    """A client that sends nothing and records when it was pinged."""

    def __init__(self, settings: BusSettings) -> None:
        super().__init__(settings)
        self.pinged_at: list[float] = []
        self.is_pinged_twice = asyncio.Event()

    async def _process_ping(self) -> None:
        self.pinged_at.append(time.monotonic())
        if len(self.pinged_at) > 1:
            self.is_pinged_twice.set()
        await super()._process_ping()


async def ping_interval_s(settings: BusSettings) -> float | None:
    """Returns the interval between the broker's PINGs; None if it exceeds a few seconds. Raises OSError and
    nats.errors.Error if it can't connect."""
    client = _Listener(settings)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            settled = settings.server_options | OPTIONS | _SILENT
            await client.connect(name="tokenbus ping probe", error_cb=_ignore, **settled)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await client.is_pinged_twice.wait()
    finally:
        await client.close()
    first, *rest = client.pinged_at or [0.0]
    return rest[0] - first if rest else None


async def _ignore(error: Exception) -> None:
    """A broker that goes away meanwhile is told by the process's own connection, in place of nats-py's tracebacks."""


async def warn_if_slow(settings: BusSettings) -> None:
    """Logs `broker_drops_late` if a frozen process would keep its connection for too long."""
    interval_s = await ping_interval_s(settings)
    if interval_s is None or interval_s > LIMIT_S:
        found = None if interval_s is None else round(interval_s, 1)
        late_logger.get_logger().warning("broker_drops_late", ping_interval_s=found)
