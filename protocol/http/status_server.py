"""The HTTP server of the status page."""

import asyncio
import inspect
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.http.http_server import EmbeddedServer, ServerConfig
from tokenbus.protocol.process import memory

_LIMITS = ConnectionLimits(total=256, per_address=64)


def make_server(
    registry: CollectorRegistry,
    unready_reason: Callable[[], str | Awaitable[str]],
    describe: Callable[[], dict[str, Any]],
) -> EmbeddedServer:
    """Returns a server of `/metrics`, `/livez`, `/readyz` and `/status`.

    `unready_reason` returns an empty string while the process is ready, `describe` what else `/status` says."""
    began_at = time.monotonic()

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = await why_unready()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    async def status(_: Request) -> Response:
        reason = await why_unready()
        return JSONResponse(
            {
                "ready": not reason,
                "reason": reason,
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - began_at, 1),
                "resident_bytes": memory.resident_bytes(),
                "tasks": len(asyncio.all_tasks()),
                **describe(),
            }
        )

    async def why_unready() -> str:
        reason = unready_reason()
        return await reason if inspect.isawaitable(reason) else reason

    routes = [Route(f"/{page.__name__}", page) for page in (metrics, livez, readyz, status)]
    return EmbeddedServer(ServerConfig(Starlette(routes=routes), _LIMITS))


def bind(host: str, ports: range) -> socket.socket:
    """Returns a socket that listens on the first free port of a range. Raises ValueError if none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]  # create_server adds the address
    shown = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise ValueError(f"--metrics-port {shown} on {host}: {reason}; choose another port")


def inherit(number: int) -> socket.socket:
    """Returns the listening socket with this file descriptor. Raises ValueError if it is not one."""
    try:
        return socket.socket(fileno=number)
    except OSError as error:
        raise ValueError(f"--metrics-fd {number} is not a socket ({error.strerror})") from error
