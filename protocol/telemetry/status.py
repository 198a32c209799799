"""The status page of every server process: `/metrics`, `/livez`, `/readyz` and `/status` over HTTP."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from tokenbus.protocol import tasks

ReadinessCheck = Callable[[], str | Awaitable[str]]
"""Returns why a process is not ready, or an empty string if it is."""
Describe = Callable[[], dict[str, Any]]
"""Returns what `/status` says of a process, besides what it says of each, in values that JSON has."""


@dataclasses.dataclass(frozen=True)
class StatusSettings:
    """The address of a process's status page."""

    host: str = "127.0.0.1"
    ports: range = range(0)
    """The first free port of these is used; 0 means any free port, and an empty range disables the page."""
    fd: int | None = None
    """An inherited listening socket to serve on instead."""


@contextlib.asynccontextmanager
async def serving(
    settings: StatusSettings, registry: CollectorRegistry, unready_reason: ReadinessCheck, describe: Describe = dict
) -> AsyncIterator[None]:
    """Serves the status page while the block runs. Raises ValueError if no port is free, or `fd` is not a socket."""
    if not settings.ports and settings.fd is None:
        yield
        return
    # Imported late: it takes a fifth of a second, which processes without the page can save.
    from tokenbus.protocol.http import status_server

    if settings.fd is None:
        listening = status_server.bind(settings.host, settings.ports)
    else:
        listening = status_server.inherit(settings.fd)
    server = status_server.make_server(registry, unready_reason, describe)
    structlog.get_logger().info("status_page", port=listening.getsockname()[1])
    with contextlib.closing(listening):
        task = tasks.awaited(server.serve([listening]))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
