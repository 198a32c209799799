"""The composition root of a gateway: creates the parts, starts them in order, and stops them in reverse."""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.callers import Callers, Tokens
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.admission.metrics import ClosedConnections, GatewayMetrics
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.admission.tenants import Tenants
from tokenbus.gateway.console.acts import ConsoleActs
from tokenbus.gateway.console.pages import ConsolePages
from tokenbus.gateway.console.viewers import ConsoleViewers
from tokenbus.gateway.dialects import refusal_response
from tokenbus.gateway.http import listen
from tokenbus.gateway.http.body import BodyMemory
from tokenbus.gateway.routes import Routes, make_app
from tokenbus.gateway.serving.endpoint import Services
from tokenbus.gateway.storage.jetstream_store import bucket_of
from tokenbus.gateway.storage.record_store import StorageLimits
from tokenbus.gateway.storage.records import Records
from tokenbus.protocol import tasks
from tokenbus.protocol.access import audit_log, usage_store
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_audit import KeyAudit
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.access.usage_store import UsageStore
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import Bucket, StreamContents, bucket_name
from tokenbus.protocol.bus.bus import OwnedBus
from tokenbus.protocol.bus.copies import CopyKeeper
from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.http.http_server import EmbeddedServer, ServerConfig, Timeouts
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import metrics, status, tracing

_AFTER_GRACE_S = 3
"""Time for sending the last events of requests that did not end by themselves."""
_SHARING_DELAY_S = 1.0
_USAGE_TIMEOUT_S = 10.0


async def serve(settings: GatewaySettings, read_settings: Callable[[], GatewaySettings]) -> None:
    """Runs a gateway until SIGTERM or SIGINT; `read_settings` re-reads its settings on SIGHUP.

    Raises ConnectionError if there is no broker, ListenError if the gateway can't listen, and StoppedError if a signal
    arrives before it has found a broker."""
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(signals.on_stop(stop.set))
        listening = stack.enter_context(contextlib.closing(_socket(settings)))
        max_connections = listen.raise_open_file_limit()
        connection = await signals.unless_stopped(stop, nats.connect(settings.broker, name="gateway"))
        stack.push_async_callback(connection.close)
        limit = ConcurrencyLimit(settings.max_requests)
        measured = GatewayMetrics()
        name = f"{socket.gethostname()}-{os.getpid()}"
        tracer = await stack.enter_async_context(tracing.exporting(settings.otlp_traces_endpoint, "gateway", name))
        client = await WireClient.from_connection(
            connection, tenant=settings.tenant, prefix=settings.prefix, tracer=tracer
        )
        stack.push_async_callback(client.close)
        watch = settings.key_settings.watch(connection, settings.prefix) if settings.key_settings.are_used else None
        if watch is not None:
            await watch.open()
            stack.callback(tasks.background("watch keys", watch.watch()).cancel)
        ring = None if watch is None else watch.ring
        audit: AuditWriter | None = None
        if settings.audit_settings.audit:
            writing = audit_log.writing(connection, settings.prefix, settings.audit_settings)
            audit = await stack.enter_async_context(writing)
            audit_log.count_records(audit, measured.audit_records)
        tenants = Tenants(client, settings, Callers(settings.api_keys, ring, measured, _tokens(settings), audit))
        stack.callback(tasks.background("release tenants", tenants.tend()).cancel)
        storage = StorageLimits(settings.stored_responses_s, settings.stored_responses_bytes)
        records = await Records.open(connection, settings.prefix, storage, measured)
        stack.callback(tasks.background("wait for the bucket of responses", records.wait_for_bucket()).cancel)
        keeper = CopyKeeper(_buckets(settings, connection), measured.bucket_copies_missing)
        stack.callback(tasks.background("keep copies of buckets", keeper.run()).cancel)
        services = Services(
            limit=limit,
            tenants=tenants,
            aliases=settings.aliases,
            bodies=BodyMemory(settings.max_body_bytes),
            broker=connection,
            metrics=measured,
            tracer=tracer,
            records=records,
            usage=UsageStore(Bucket(connection, bucket_name(settings.prefix, usage_store.BUCKET), _USAGE_TIMEOUT_S)),
        )
        routes = Routes(services)
        viewers = ConsoleViewers(client.view_fleet)
        acts = _console_acts(settings, services, connection)
        pages = ConsolePages(services, viewers, acts.parts_of)
        app = make_app(services, routes, acts.routes() + pages.routes(), settings.allowed_origins)
        gateway = Gateway(settings, services, app, max_connections, measured, viewers)
        page = metrics.MetricsCollector(measured.families(), gateway.update_gauges)
        await stack.enter_async_context(status.serving(settings.status_page, page.registry, routes.unready_reason))
        signals.on_hangup(read_settings, gateway.apply_settings)
        await gateway.run(listening, connection, stop)


def _buckets(settings: GatewaySettings, connection: nats.Connection) -> list[StreamContents]:
    """Returns all that a gateway may keep in the broker, or reads there."""
    found: list[StreamContents] = [Bucket(connection, bucket_of(settings.prefix))]
    found += settings.key_settings.buckets(connection, settings.prefix)
    if settings.audit_settings.audit:
        found.append(audit_log.AuditLog(connection, settings.prefix))
    return found


def _console_acts(settings: GatewaySettings, services: Services, connection: nats.Connection) -> ConsoleActs:
    store = settings.key_settings.store(connection, settings.prefix) if settings.key_settings.are_used else None
    audit = functools.partial(KeyAudit, connection, settings.prefix, settings.audit_settings)
    log = audit if settings.audit_settings.audit else None
    return ConsoleActs(services, store, log, is_allowed=settings.console_operate)


def _tokens(settings: GatewaySettings) -> Tokens | None:
    if not settings.oidc.issuer:
        return None
    from tokenbus.gateway.admission.oidc import OidcTokens  # its library is an extra of its own

    return OidcTokens(settings.oidc, settings.tenant)


class Gateway:
    """The HTTP server of a gateway, with settings that may change while it serves."""

    def __init__(
        self,
        settings: GatewaySettings,
        services: Services,
        app: ASGIApp,
        max_connections: int,
        measured: GatewayMetrics,
        viewers: ConsoleViewers,
    ) -> None:
        """`max_connections` is the number of connections that the system allows this process."""
        self._settings = settings
        self._services = services
        self._tenants = services.tenants
        self._limit = services.limit
        self._max_connections = max_connections
        self._metrics = measured
        self._viewers = viewers
        self._config = ServerConfig(
            app,
            self._connection_limits(settings),
            refusal_response=refusal_response,
            on_closed=ClosedConnections(measured).record,
            timeouts=Timeouts(slow_reader_s=settings.write_deadline_s),
            grace_s=_shutdown_timeout_s(settings),
        )
        self._sharing: asyncio.TimerHandle | None = None
        self._share_records()
        if self._tenants.callers.ring is not None:
            self._tenants.callers.ring.on_change.append(self._key_changed)
        self._tenants.callers.on_tenant = self._share_soon

    def __repr__(self) -> str:
        return f"<Gateway {self._tenants.callers!r} {self._limit!r}>"

    def _key_changed(self, before: KeyRecord | None, after: KeyRecord | None) -> None:
        was_valid, is_valid = (one is not None and one.revoked_at is None for one in (before, after))
        if self._settings.revoke_ends_streams and before is not None and was_valid and not is_valid:
            self._tenants.end_streams(before.id)
        self._share_soon()

    def _share_soon(self) -> None:
        if self._sharing is None:  # once for all keys of a change
            self._sharing = asyncio.get_running_loop().call_later(_SHARING_DELAY_S, self._share_records)

    def _share_records(self) -> None:
        """Gives each tenant an equal share of the stored responses."""
        self._sharing = None
        num_tenants = len(self._tenants.callers.tenants)
        if self._settings.oidc.tenant_claim:  # there may be others that have not come yet
            num_tenants += 1
        self._services.records.share_among(num_tenants)

    def update_gauges(self) -> None:
        connections = self._config.open_connections
        self._tenants.callers.update_gauges()
        self._metrics.console_viewers.set(len(self._viewers))
        self._metrics.update_gauges(self._limit.num_open, len(connections), connections.num_idle)

    async def apply_settings(self, settings: GatewaySettings) -> None:
        """Applies the settings that may change."""
        self._settings = settings
        self._tenants.callers.api_keys = settings.api_keys
        self._limit.resize(settings.max_requests)
        self._config.open_connections.limits = self._connection_limits(settings)
        self._config.timeout_graceful_shutdown = _shutdown_timeout_s(settings)
        self._services.aliases = settings.aliases
        self._share_records()

    async def run(self, listening: socket.socket, broker: OwnedBus, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains. Raises ConnectionError if the broker closes the connection for
        good."""
        url = listen.base_url(listening)
        server = EmbeddedServer(self._config)
        serving = tasks.awaited(server.serve([listening]))
        stopped, closed = tasks.awaited(stop.wait()), tasks.awaited(broker.wait_closed())
        structlog.get_logger().info(
            "gateway_ready",
            url=url,
            max_requests=self._settings.max_requests,
            needs_key=not self._settings.allows_anonymous,
        )
        with contextlib.suppress(OSError):  # a full disk, or a reader that is gone, must not end it
            print(f"tokenbus: the gateway serves {url}", flush=True)
        try:
            await asyncio.wait([serving, stopped, closed], return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await self._limit.drain(self._settings.grace_s)
            await serving
            if closed.done():
                closed.result()
        finally:
            for task in (serving, stopped, closed):
                task.cancel()
            await asyncio.gather(serving, stopped, closed, return_exceptions=True)

    def _connection_limits(self, settings: GatewaySettings) -> ConnectionLimits:
        """Returns limits with room for idle connections besides those of `max_requests`."""
        total = min(self._max_connections, 2 * settings.max_requests + 64)
        return ConnectionLimits(total, settings.max_connections_per_address)


def _socket(settings: GatewaySettings) -> socket.socket:
    if settings.fd is None:
        listening = listen.bind(settings.host, settings.port, ": pass --port 0 for a free port")
    else:
        listening = listen.inherit(settings.fd)
    listen.detect_slow_clients(listening, settings.write_deadline_s)
    return listening


def _shutdown_timeout_s(settings: GatewaySettings) -> int:
    return round(settings.grace_s) + _AFTER_GRACE_S
