"""What every server process shows over HTTP: `/metrics`, `/livez` and `/readyz`."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from prometheus_client import CollectorRegistry

ReadinessCheck = Callable[[], str | Awaitable[str]]
"""Says why a process can't do its work now; nothing where it can."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where a process shows its metrics and health."""

    host: str = "127.0.0.1"
    ports: range = range(0)
    """The first that is free is taken, and of 0 any; an empty range shows nothing."""


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, registry: CollectorRegistry, unready_reason: ReadinessCheck
) -> AsyncIterator[None]:
    """Serves the page while the block runs. Raises ValueError where the port can't be had."""
    if not settings.ports:
        yield
        return
    from tokenbus.protocol.http.status_server import StatusServer  # a fifth of a second that no other process needs

    server = StatusServer(settings, registry, unready_reason)
    structlog.get_logger().info("status_page", port=server.port)
    task = asyncio.create_task(server.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
