"""The HTTP server of the status page."""

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


class StatusServer:
    """Serves `/metrics`, `/livez`, `/readyz` and `/status` on a listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        registry: CollectorRegistry,
        unready_reason: Callable[[], str | Awaitable[str]],
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`unready_reason` returns an empty string while the process is ready, `describe` what else `/status` says."""
        self._registry = registry
        self._unready_reason = unready_reason
        self._describe = describe
        self._began_at = time.monotonic()
        pages = {
            "/metrics": self._metrics,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/status": self._status,
        }
        routes = [Route(path, page) for path, page in pages.items()]
        self._server = EmbeddedServer(ServerConfig(Starlette(routes=routes), _LIMITS))
        self._socket = listening
        self.port: int = listening.getsockname()[1]

    def __repr__(self) -> str:
        return f"<StatusServer on port {self.port}>"

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _status(self, _: Request) -> Response:
        reason = await self._reason()
        status = {
            "ready": not reason,
            "reason": reason,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began_at, 1),
            "resident_bytes": memory.resident_bytes(),
            **self._describe(),
        }
        return JSONResponse(status)

    async def _reason(self) -> str:
        reason = self._unready_reason()
        return await reason if inspect.isawaitable(reason) else reason

    async def _readyz(self, _: Request) -> Response:
        reason = await self._reason()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)


def bind(host: str, ports: range) -> socket.socket:
    """Returns a socket that listens on the first free port of a range. Raises ValueError if none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
    shown = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise ValueError(f"--metrics-port {shown} on {host}: {reason}; choose another port")


def inherit(number: int) -> socket.socket:
    """Returns the listening socket with this file descriptor. Raises ValueError if it is not one."""
    try:
        return socket.socket(fileno=number)
    except OSError as error:
        raise ValueError(f"--metrics-fd {number} is not a socket ({error.strerror})") from error
