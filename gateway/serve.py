"""The composition root of a gateway: makes the parts, starts them in order, and takes them down in reverse."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import structlog
import uvicorn
from starlette.types import ASGIApp

from tokenbus.gateway import app, listen
from tokenbus.gateway.catalog import Catalog
from tokenbus.gateway.chat import ChatCompletions
from tokenbus.gateway.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai import closed_connections
from tokenbus.gateway.openai.routes import Routes
from tokenbus.gateway.settings import GatewaySettings
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.http import http_server
from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.process import reload, shutdown
from tokenbus.protocol.telemetry import metrics, status, tracing

_AFTER_GRACE_S = 3
"""For writing out the last events of what did not end by itself."""


async def serve(settings: GatewaySettings, read_settings: Callable[[], GatewaySettings]) -> None:
    """Runs a gateway until SIGTERM or SIGINT; `read_settings` reads its settings anew.

    Raises ConnectionError when there is no broker, ListenError when it can't listen, and StoppedError when a signal
    comes before it has found a broker."""
    leave = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(shutdown.on_stop(leave.set))
        listening = stack.enter_context(contextlib.closing(_socket(settings)))
        allowed = listen.raise_open_file_limit()
        connection = await shutdown.unless_stopped(leave, nats.connect(settings.broker, name="gateway"))
        stack.push_async_callback(connection.close)
        concurrency_limit = ConcurrencyLimit(settings.max_requests)
        measured = GatewayMetrics()
        name = f"{socket.gethostname()}-{os.getpid()}"
        tracer = await stack.enter_async_context(tracing.exporting(settings.otlp_traces_endpoint, "gateway", name))
        tenants = await Tenants.create(connection, settings, tracer)
        stack.push_async_callback(tenants.gateway_client.close)
        routes = Routes(concurrency_limit, tenants, connection, Catalog(tenants.gateway_client.models))
        application = app.make(ChatCompletions(concurrency_limit, tenants, connection, measured, tracer), routes)
        config = _config(settings, application, allowed, measured)

        def show() -> None:
            measured.show(concurrency_limit.num_open, len(config.open_connections), config.open_connections.num_idle)

        page = metrics.MetricsCollector(measured.families(), show)
        await stack.enter_async_context(status.serving(settings.status_page, page.registry, routes.unready_reason))
        reloadable = ReloadableSettings(settings, concurrency_limit, tenants, config, allowed)
        reload.on_hangup(read_settings, reloadable.apply)
        await _run(reloadable, http_server.EmbeddedServer(config), listening, connection, concurrency_limit, leave)


class ReloadableSettings:
    """What of a gateway's settings may change while it serves."""

    def __init__(
        self,
        settings: GatewaySettings,
        concurrency_limit: ConcurrencyLimit,
        tenants: Tenants,
        server: http_server.ServerConfig,
        allowed: int,
    ) -> None:
        """`allowed` connections are as many as the system lets the process have."""
        self.settings = settings
        self._concurrency_limit = concurrency_limit
        self._tenants = tenants
        self._server = server
        self._allowed = allowed

    def __repr__(self) -> str:
        return f"<Adopted {self.settings.keys!r} {self._concurrency_limit!r}>"

    async def apply(self, settings: GatewaySettings) -> None:
        """Other settings from now on. Raises what keeps a tenant that is new from asking."""
        self.settings = settings
        self._concurrency_limit.resize(settings.max_requests)
        self._server.open_connections.limits = _connection_limits(settings, self._allowed)
        self._server.timeout_graceful_shutdown = _shutdown_timeout_s(settings)
        await self._tenants.set_keys(settings.keys)


def _socket(settings: GatewaySettings) -> socket.socket:
    if settings.fd is None:
        listening = listen.bind(settings.host, settings.port, ": pass --port 0 for a free port")
    else:
        listening = listen.inherit(settings.fd)
    listen.detect_dead_clients(listening)
    return listening


async def _run(
    reloadable: ReloadableSettings,
    server: uvicorn.Server,
    listening: socket.socket,
    broker: Bus,
    concurrency_limit: ConcurrencyLimit,
    leave: asyncio.Event,
) -> None:
    url = listen.base_url(listening)
    serving = asyncio.create_task(server.serve([listening]))
    others = [asyncio.create_task(life) for life in (_wait(leave), broker.wait_closed())]
    structlog.get_logger().info(
        "gateway_ready",
        url=url,
        max_requests=reloadable.settings.max_requests,
        needs_key=not reloadable.settings.keys.allows_anonymous,
    )
    print(f"tokenbus: the gateway serves {url}", flush=True)
    try:
        await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await concurrency_limit.drain(reloadable.settings.grace_s)
        await serving
        for task in others:
            if task.done():
                task.result()
    finally:
        for task in (serving, *others):
            task.cancel()
        await asyncio.gather(serving, *others, return_exceptions=True)


async def _wait(leave: asyncio.Event) -> None:
    await leave.wait()


def _config(
    settings: GatewaySettings, application: ASGIApp, allowed: int, measured: GatewayMetrics
) -> http_server.ServerConfig:
    return http_server.ServerConfig(
        application,
        _connection_limits(settings, allowed),
        refusal_response=closed_connections.refusal_response,
        on_closed=closed_connections.ClosedConnections(measured).record,
        grace_s=_shutdown_timeout_s(settings),
    )


def _connection_limits(settings: GatewaySettings, allowed: int) -> ConnectionLimits:
    """Of connections; those that ask for nothing included."""
    return ConnectionLimits(min(allowed, 2 * settings.max_requests + 64), settings.max_connections_per_address)


def _shutdown_timeout_s(settings: GatewaySettings) -> int:
    """For connections that are open when the gateway leaves."""
    return round(settings.grace_s) + _AFTER_GRACE_S
