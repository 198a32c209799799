"""The status page of every server process: `/metrics`, `/livez` and `/readyz` over HTTP."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from prometheus_client import CollectorRegistry

ReadinessCheck = Callable[[], str | Awaitable[str]]
"""Returns why a process is not ready, or an empty string if it is."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The address of a process's status page."""

    host: str = "127.0.0.1"
    ports: range = range(0)
    """The first free port of these is taken; 0 takes any free port, and an empty range switches the page off."""


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, registry: CollectorRegistry, unready_reason: ReadinessCheck
) -> AsyncIterator[None]:
    """Serves the status page while the block runs. Raises ValueError if no port is free."""
    if not settings.ports:
        yield
        return
    # Imported late: it takes a fifth of a second, which processes without the page need not spend.
    from tokenbus.protocol.http.status_server import StatusServer

    server = StatusServer(settings.host, settings.ports, registry, unready_reason)
    structlog.get_logger().info("status_page", port=server.port)
    task = asyncio.create_task(server.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
