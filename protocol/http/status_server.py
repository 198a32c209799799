"""The HTTP server behind a process's status page."""

import inspect
import socket

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.http.http_server import EmbeddedServer, ServerConfig
from tokenbus.protocol.telemetry.status import ReadinessCheck, Settings

_LIMITS = ConnectionLimits(total=256, per_address=64)


class StatusServer:
    """`unready_reason` says why the process can't do its work now; nothing where it can."""

    def __init__(self, settings: Settings, registry: CollectorRegistry, unready_reason: ReadinessCheck) -> None:
        self._registry = registry
        self._unready_reason = unready_reason
        routes = [Route("/metrics", self._metrics), Route("/livez", self._livez), Route("/readyz", self._readyz)]
        self._server = EmbeddedServer(ServerConfig(Starlette(routes=routes), _LIMITS))
        self._socket = _bind(settings)
        self.port: int = self._socket.getsockname()[1]

    def __repr__(self) -> str:
        return f"<StatusServer on port {self.port}>"

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        reason = self._unready_reason()
        if inspect.isawaitable(reason):
            reason = await reason
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)


def _bind(settings: Settings) -> socket.socket:
    """Raises ValueError where every port is taken, or the address nobody's."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    reason = ""
    for port in settings.ports:
        try:
            return socket.create_server((settings.host, port), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
    first, last = settings.ports[0], settings.ports[-1]
    asked = str(first) if first == last else f"{first}-{last}"
    raise ValueError(f"--metrics-port {asked} on {settings.host}: {reason}; take another")
