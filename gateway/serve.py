"""The composition root of a gateway: makes the parts, starts them in order, and takes them down in reverse."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import structlog
import uvicorn
from starlette.types import ASGIApp

from gateway import app, listen
from gateway.chat import Chat
from gateway.door import Door
from gateway.metrics import GatewayMetrics
from gateway.pages import Pages
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from protocol import connection as nats
from protocol import metrics, reload, status, status_server, stopping, traces
from protocol.bus import Bus

_KEEP_ALIVE_S = 30
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
        connection = await stopping.unless(leave, nats.connect(settings.broker, name="gateway"))
        stack.push_async_callback(connection.close)
        door = Door(settings.max_requests)
        measured = GatewayMetrics()
        page = metrics.Page(measured.families(), lambda: measured.open.of().set(door.num_open))
        await stack.enter_async_context(status.shown(settings.status_page, page.registry, lambda: ""))
        name = f"{socket.gethostname()}-{os.getpid()}"
        traced = traces.make(settings.otlp_traces_endpoint, "gateway", name)
        stack.push_async_callback(traced.close)
        tenants = await Tenants.over(connection, settings, traced)
        stack.push_async_callback(tenants.own.close)
        application = app.make(Chat(door, tenants, connection, measured, traced), Pages(door, tenants, connection))
        server = status_server.QuietServer(_config(settings, application))
        adopted = Adopted(settings, door, tenants, server.config)
        reload.on_hangup(again, adopted.adopt)
        await _run(adopted, server, listening, connection, door, leave)


class Adopted:
    """What of a gateway's settings may change while it serves."""

    def __init__(self, settings: GatewaySettings, door: Door, tenants: Tenants, server: uvicorn.Config) -> None:
        self.settings = settings
        self._door = door
        self._tenants = tenants
        self._server = server
        self._using: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Adopted {self.settings.keys!r} {self._door!r}>"

    def adopt(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._door.set(settings.max_requests)
        self._server.limit_concurrency = _most_connections(settings)
        self._server.timeout_graceful_shutdown = _patience_s(settings)
        self._using = asyncio.get_running_loop().create_task(self._tenants.use(settings.keys))


def _socket(settings: GatewaySettings) -> socket.socket:
    if settings.fd is None:
        listening = listen.bind(settings.host, settings.port, ": pass --port 0 for a free port")
    else:
        listening = listen.inherit(settings.fd)
    listen.watch_readers(listening)
    listen.allow_connections()
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


def _config(settings: GatewaySettings, application: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # each request has its own lines in our log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_most_connections(settings),
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_patience_s(settings),
    )


def _most_connections(settings: GatewaySettings) -> int:
    """Those that ask for nothing included."""
    return 2 * settings.max_requests + 64


def _patience_s(settings: GatewaySettings) -> int:
    """For connections that are open when the gateway leaves."""
    return round(settings.grace_s) + _AFTER_GRACE_S
