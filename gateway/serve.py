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
from tokenbus.gateway.chat import Chat
from tokenbus.gateway.door import Door
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai import refusals
from tokenbus.gateway.openai.pages import Pages
from tokenbus.gateway.settings import GatewaySettings
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.http import http_server
from tokenbus.protocol.http.http_connections import Bounds
from tokenbus.protocol.process import reload, stopping
from tokenbus.protocol.telemetry import metrics, status, traces

_AFTER_GRACE_S = 3
"""For writing out the last events of what did not end by itself."""


async def serve(settings: GatewaySettings, again: Callable[[], GatewaySettings]) -> None:
    """Runs a gateway until SIGTERM or SIGINT; `again` reads its settings anew.

    Raises ConnectionError when there is no broker, TakenError when it can't listen, and StoppedError when a signal
    comes before it has found a broker."""
    leave = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stopping.on_stop(leave.set))
        listening = stack.enter_context(contextlib.closing(_socket(settings)))
        allowed = listen.allow_connections()
        connection = await stopping.unless(leave, nats.connect(settings.broker, name="gateway"))
        stack.push_async_callback(connection.close)
        door = Door(settings.max_requests)
        measured = GatewayMetrics()
        name = f"{socket.gethostname()}-{os.getpid()}"
        traced = traces.make(settings.otlp_traces_endpoint, "gateway", name)
        stack.push_async_callback(traced.close)
        tenants = await Tenants.over(connection, settings, traced)
        stack.push_async_callback(tenants.own.close)
        pages = Pages(door, tenants, connection, Catalog(tenants.own.models))
        application = app.make(Chat(door, tenants, connection, measured, traced), pages)
        config = _config(settings, application, allowed, measured)

        def show() -> None:
            measured.show(door.num_open, len(config.open_connections), config.open_connections.num_waiting)

        page = metrics.Page(measured.families(), show)
        await stack.enter_async_context(status.shown(settings.status_page, page.registry, pages.why_not_ready))
        adopted = Adopted(settings, door, tenants, config, allowed)
        reload.on_hangup(again, adopted.adopt)
        await _run(adopted, http_server.QuietServer(config), listening, connection, door, leave)


class Adopted:
    """What of a gateway's settings may change while it serves."""

    def __init__(
        self, settings: GatewaySettings, door: Door, tenants: Tenants, server: http_server.Config, allowed: int
    ) -> None:
        """`allowed` connections are as many as the system lets the process have."""
        self.settings = settings
        self._door = door
        self._tenants = tenants
        self._server = server
        self._allowed = allowed

    def __repr__(self) -> str:
        return f"<Adopted {self.settings.keys!r} {self._door!r}>"

    async def adopt(self, settings: GatewaySettings) -> None:
        """Other settings from now on. Raises what keeps a tenant that is new from asking."""
        self.settings = settings
        self._door.set(settings.max_requests)
        self._server.open_connections.bounds = _bounds(settings, self._allowed)
        self._server.timeout_graceful_shutdown = _patience_s(settings)
        await self._tenants.use(settings.keys)


def _socket(settings: GatewaySettings) -> socket.socket:
    if settings.fd is None:
        listening = listen.bind(settings.host, settings.port, ": pass --port 0 for a free port")
    else:
        listening = listen.inherit(settings.fd)
    listen.watch_readers(listening)
    return listening


async def _run(
    adopted: Adopted,
    server: uvicorn.Server,
    listening: socket.socket,
    broker: Bus,
    door: Door,
    leave: asyncio.Event,
) -> None:
    url = listen.url_of(listening)
    serving = asyncio.create_task(server.serve([listening]))
    others = [asyncio.create_task(life) for life in (_wait(leave), broker.until_refused())]
    structlog.get_logger().info(
        "gateway_ready",
        url=url,
        max_requests=adopted.settings.max_requests,
        needs_key=not adopted.settings.keys.is_open,
    )
    print(f"tokenbus: the gateway serves {url}", flush=True)
    try:
        await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await door.close(adopted.settings.grace_s)
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
) -> http_server.Config:
    return http_server.Config(
        application,
        _bounds(settings, allowed),
        written=refusals.written,
        on_ended=refusals.Refusals(measured).ended,
        grace_s=_patience_s(settings),
    )


def _bounds(settings: GatewaySettings, allowed: int) -> Bounds:
    """Of connections; those that ask for nothing included."""
    return Bounds(min(allowed, 2 * settings.max_requests + 64), settings.max_connections_per_address)


def _patience_s(settings: GatewaySettings) -> int:
    """For connections that are open when the gateway leaves."""
    return round(settings.grace_s) + _AFTER_GRACE_S
