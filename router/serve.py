"""The composition root of a router: makes the parts, starts them in order, and takes them down in reverse."""

import asyncio
import contextlib
import dataclasses
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping

import structlog

from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.process import reload, shutdown
from tokenbus.protocol.telemetry import metrics, status, tracing
from tokenbus.protocol.wire import subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.models import Models
from tokenbus.router.placement.policies import make_policies
from tokenbus.router.requests.dispatch import Dispatch
from tokenbus.router.requests.embeddings import Embeddings
from tokenbus.router.requests.flight import Flights
from tokenbus.router.requests.intake import Intake
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.placement_queue import PlacementQueue, PolicySettings, QueueSettings
from tokenbus.router.requests.rate_limiter import RateLimiter, TenantLimits
from tokenbus.router.requests.request_telemetry import RequestLogSettings, RequestTelemetry
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.requests.tokenizer_cache import TokenizerCache
from tokenbus.router.watch import FleetWatch

_BYTES_PER_BLOCK = 87
"""Of the prefix index, measured over a million blocks (bench.index_memory)."""


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """All settings of one router."""

    broker: nats.Settings = dataclasses.field(default_factory=nats.Settings)
    prefix: str = subjects.DEFAULT_PREFIX
    router_id: str = ""
    """Name of this router in logs; made up from host name and process id where absent."""
    policy: str = "kv"
    """How workers are chosen where a request does not say."""
    temperature: float = 0.0
    """0 always chooses the lowest cost; above it dearer workers are drawn too, the less often the dearer."""
    queue: QueueSettings = dataclasses.field(default_factory=QueueSettings)
    """How many requests may wait while every worker is busy."""
    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """What a client's reply subject may begin with."""
    max_request_bytes: int = 0
    """Largest request; half of what the broker takes where 0."""
    max_flights: int = 16_384
    """Requests held at a time; beyond that they are refused with `overloaded`."""
    max_prompt_bytes: int = 256 * 1024 * 1024
    """What their prompts may take in memory; likewise."""
    tenant_limits: TenantLimits = dataclasses.field(default_factory=TenantLimits)
    """Of every tenant that has none of its own; of this router alone, as all of these are."""
    tenant_limit_overrides: Mapping[str, TenantLimits] = dataclasses.field(default_factory=dict)
    """By the tenant's name."""
    status_page: status.Settings = dataclasses.field(default_factory=status.Settings)
    """Where it shows its metrics and health."""
    request_log: RequestLogSettings = dataclasses.field(default_factory=RequestLogSettings)
    """What the log says of requests."""
    otlp_traces_endpoint: str = ""
    """Where spans of requests are sent; nowhere where empty."""
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError for a policy that there is not."""
        if self.policy not in (known := make_policies()):
            raise ValueError(f"--policy must be one of {', '.join(known)}, got {self.policy!r}")


class Router:
    """One router over a bus: joins its parts together."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        router_id: str,
        settings: RouterSettings,
        rng: random.Random,
        tracer: tracing.Tracer,
    ) -> None:
        fleet = self.fleet = Fleet(time.monotonic())
        flights = Flights(settings.max_flights, settings.max_prompt_bytes)
        measured = self.metrics = RouterMetrics()
        replies = self._replies = ReplySender(bus)
        terminals = TerminalPublisher(bus, replies, router_id, measured)
        choice = PolicySettings(make_policies(), settings.policy, rng, settings.temperature)
        queue = PlacementQueue(fleet, choice, settings.queue, measured)
        dispatch = Dispatch(bus, names, fleet, flights, queue, router_id, measured)
        telemetry = self._telemetry = RequestTelemetry(measured, tracer, settings.request_log)
        rate_limiter = self._rate_limiter = RateLimiter(settings.tenant_limits, settings.tenant_limit_overrides)
        self._lifecycle = RequestLifecycle(
            fleet, flights, TokenizerCache(bus, names, fleet), queue, dispatch, terminals, rate_limiter, telemetry
        )
        self._bus, self._flights, self._queue = bus, flights, queue
        most = settings.max_request_bytes or nats.default_max_request_bytes(bus.max_payload)
        self._embeddings = Embeddings(bus, replies, names, fleet, rng, measured, tracer)
        models = Models(fleet, queue, router_id, most)
        prefixes = settings.inbox_prefixes
        self._intake = Intake(bus, replies, names, prefixes, most, models, self._lifecycle, self._embeddings, terminals)
        self._drops_counted = 0
        self._watch = FleetWatch(bus, names, fleet, flights, self._lifecycle, measured)

    def __repr__(self) -> str:
        return f"<Router {self._watch!r} {self._lifecycle!r}>"

    @property
    def unready_reason(self) -> str:
        """Empty while it can place requests."""
        if not self._bus.is_connected:
            return "there is no connection to the broker"
        if not any(True for _ in self.fleet.models()):
            return "no worker is known"
        return "" if self._intake.is_open else "it takes no requests"

    def show(self) -> None:
        """Brings levels up to date, for a scrape."""
        shown = self.metrics
        shown.ready.set(not self.unready_reason)
        shown.in_flight.set(len(self._flights))
        shown.queue_limit.set(self._queue.most_waiting)
        shown.messages_dropped.inc(self._intake.num_dropped - self._drops_counted)
        self._drops_counted = self._intake.num_dropped
        for family in (shown.queue_depth, shown.workers, shown.event_logs, shown.index_blocks, shown.index_bytes):
            family.clear()
        shown.show_models({model for model, _ in self.fleet.models()}, self.fleet.known_models())
        for model, depth in self._queue.depths().items():
            shown.queue_depth.labels(model).inc(depth)  # several models may be shown as one
        for model, workers in self.fleet.models():
            blocks = self.fleet.num_blocks(model)
            shown.index_blocks.labels(model).inc(blocks)
            shown.index_bytes.labels(model).inc(blocks * _BYTES_PER_BLOCK)
            for worker in workers:
                shown.workers.labels(model, "silent" if worker.lease_expired else worker.state).inc()
                shown.event_logs.labels(model, worker.event_state).inc()

    def adopt(self, settings: RouterSettings) -> None:
        """What of its settings may change while it serves."""
        self._queue.adopt(settings.policy, settings.temperature, settings.queue)
        self._rate_limiter.set(settings.tenant_limits, settings.tenant_limit_overrides)
        self._telemetry.settings = settings.request_log

    async def open(self) -> None:
        """Learns who is there, and takes requests from then on."""
        await self._watch.open()
        await self._intake.open()

    async def run(self) -> None:
        """Watches the fleet until cancelled."""
        await self._watch.watch()

    async def stop_intake(self) -> None:
        """Takes no more requests."""
        await self._intake.close()

    async def drain(self) -> None:
        """Returns when every request taken is with a worker, or has ended."""
        await self._lifecycle.drain()
        await self._embeddings.drain()

    async def shut_down(self) -> None:
        """The last act: closes the books. From then on it sends nothing."""
        await self._lifecycle.leave()
        await self._embeddings.leave()
        self._replies.send_pending()


async def serve(settings: RouterSettings, again: Callable[[], RouterSettings]) -> None:
    """Runs a router until SIGTERM or SIGINT; `again` reads its settings anew. Raises ConnectionError when there is no
    broker, and StoppedError when a signal comes before it has found one."""
    leave = asyncio.Event()
    router_id = settings.router_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    structlog.contextvars.bind_contextvars(router_id=router_id)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(shutdown.on_stop(leave.set))
        connection = await shutdown.unless_stopped(leave, nats.connect(settings.broker, name=f"router {router_id}"))
        stack.push_async_callback(connection.close)
        names = subjects.Subjects(settings.prefix)
        tracer = await stack.enter_async_context(tracing.exporting(settings.otlp_traces_endpoint, "router", router_id))
        router = Router(connection, names, router_id, settings, random.Random(), tracer)
        page = metrics.MetricsCollector(router.metrics.families(), router.show)
        await stack.enter_async_context(
            status.serving(settings.status_page, page.registry, lambda: router.unready_reason)
        )
        await router.open()
        reload.on_hangup(again, router.adopt)
        structlog.get_logger().info("router_ready", policy=settings.policy)
        await _run(settings, connection, router, leave)


async def _run(settings: RouterSettings, bus: Bus, router: Router, leave: asyncio.Event) -> None:
    lives = (router.run(), bus.wait_closed())
    tasks: list[asyncio.Task[None]] = [asyncio.create_task(life) for life in lives]
    left = asyncio.create_task(leave.wait())
    try:
        await asyncio.wait([left, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        await router.stop_intake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await router.drain()
        await router.shut_down()
    finally:
        left.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(left, *tasks, return_exceptions=True)
