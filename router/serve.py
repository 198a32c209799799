"""The composition root of a router: builds the parts, starts them in order, and stops them in reverse."""

import asyncio
import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.access import audit_log, usage_store
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus import ping_probe
from tokenbus.protocol.bus.bucket import Bucket, StreamContents, bucket_name
from tokenbus.protocol.bus.bus import OwnedBus
from tokenbus.protocol.bus.copies import CopyKeeper
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import metrics, status, tracing
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.router.access.key_checks import KeyChecks
from tokenbus.router.access.limits import Limits
from tokenbus.router.access.quota import Quota
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.placement.policies import make_policies
from tokenbus.router.placement.sites import OwnSite
from tokenbus.router.requests.attempts import Attempts
from tokenbus.router.requests.calls.cache_hints import CacheHints
from tokenbus.router.requests.calls.client_calls import CallKind, ClientCalls
from tokenbus.router.requests.calls.pooling import EmbedCalls, RerankCalls
from tokenbus.router.requests.calls.tokenizing import DetokenizeCalls, TokenizeCalls
from tokenbus.router.requests.dispatch import Dispatcher
from tokenbus.router.requests.fleet_viewers import FleetViewers
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.flights.flight import Flights
from tokenbus.router.requests.flights.request_telemetry import FlightTelemetry
from tokenbus.router.requests.flights.worker_client import AnyWorker, WorkerClient
from tokenbus.router.requests.guardianship import Guardianship
from tokenbus.router.requests.intake import Intake
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.listing import SystemListing
from tokenbus.router.requests.models import ModelCatalog
from tokenbus.router.requests.next_turns import NextTurns
from tokenbus.router.requests.passing_on import PassingOn
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue, PolicySettings
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.requests.tokenization.piece_cache import PieceCache
from tokenbus.router.requests.tokenization.prompt_tokenizer import PromptTokenizer
from tokenbus.router.requests.tokenization.tokenizer_cache import TokenizerCache
from tokenbus.router.requests.traces import RequestTraces
from tokenbus.router.settings import RouterSettings
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.usage.audited_ends import audit_ends
from tokenbus.router.usage.recorder import UsageRecorder
from tokenbus.router.usage.writer import UsageWriter
from tokenbus.router.watch import FleetWatch

_INDEX_BYTES_PER_BLOCK = 87
"""Memory of the prefix index, measured with a million blocks (bench.router.index_memory)."""


class Router:
    """One router on a bus."""

    def __init__(
        self,
        bus: OwnedBus,
        names: subjects.Subjects,
        router_id: str,
        settings: RouterSettings,
        rng: random.Random,
        tracer: tracing.Tracer,
        keys: KeyChecks | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        """`keys` checks requests that name an API key; without it there are none. Limits are leased from `bucket`;
        without it they are shared out among the routers that are heard of."""
        self.metrics = RouterMetrics()
        self.ends = RequestEnds(router_id)
        self.usage: UsageRecorder | None = None
        """Counts what requests use, if that is wanted."""
        self.audit: AuditWriter | None = None
        """Writes to the audit log, if that is wanted."""
        own_site = OwnSite(settings.site, settings.site_cost_s)
        self.fleet = Fleet(time.monotonic(), settings.expected_models, own_site)
        self.flights = Flights(settings.max_flights, settings.max_prompt_bytes)
        self._bus = bus
        self._replies = ReplySender(bus)
        policy = PolicySettings(
            make_policies(), settings.policy, rng, settings.temperature, settings.min_remote_prefill_tokens
        )
        self._queue = PlacementQueue(self.fleet, policy, settings.queue, self.metrics)
        of_key = None if keys is None else keys.limits_of
        self._limits = Limits(settings.tenant_limits, settings.tenant_limit_overrides, of_key)
        self._quota = quota = Quota(self._limits, bus, names, router_id, bucket, self.metrics, rng)
        self._telemetry = FlightTelemetry(self.metrics, tracer, settings.request_log)
        terminals = TerminalPublisher(bus, self._replies, router_id, self.metrics)
        self._workers = workers = WorkerClient(bus, names, router_id, settings.max_upload_bytes)
        any_worker = AnyWorker(self.fleet, workers)
        tokenizers = TokenizerCache(bus, names, self.fleet)
        self._loads = ModelLoads(self.fleet, any_worker, self._queue, settings.hold_s)
        self._pieces = PieceCache(settings.tokenization_cache_bytes, self.metrics.tokenized_chars)
        prompts = PromptTokenizer(self.fleet, tokenizers, any_worker, self._loads, self._telemetry, self._pieces)
        attempts = Attempts(bus, names, workers, self.fleet, self.flights, router_id)
        self._lifecycle = RequestLifecycle(
            self.fleet,
            self.flights,
            prompts,
            self._queue,
            Dispatcher(self.fleet, self._queue, attempts, self._loads, self.metrics, settings.patience_s),
            self._loads,
            terminals,
            quota,
            self._telemetry,
            self.ends,
            NextTurns(self.fleet, prompts, workers),
        )
        self._calls = ClientCalls(self._replies, tracer, self.ends, quota)
        kinds: list[CallKind[Any, Any]] = [
            EmbedCalls(any_worker, workers, self.fleet, self._loads, rng, self.metrics),
            RerankCalls(any_worker, workers, self.fleet, self._loads, rng, self.metrics),
            TokenizeCalls(prompts, self.fleet, self.metrics),
            DetokenizeCalls(prompts, self.fleet, self.metrics),
            CacheHints(self.fleet, workers, self.metrics),
        ]
        self._part = ModelPart(settings.model_patterns)
        self._catalog = catalog = ModelCatalog(
            self.fleet, self._queue, router_id, settings.max_request_bytes, settings.model_patterns
        )
        self._listing = SystemListing(bus, self._replies, names, catalog, self._part, workers)
        self._viewers = FleetViewers(
            bus, self._replies, self.fleet, router_id, self._stats, self._queued, self._limits_seen_by
        )
        self._traces = RequestTraces(self._replies, router_id, self.flights, lambda: bus.max_payload)
        self.ends.on_flight = self._traces.keep
        self._opened = asyncio.Event()
        self._intake = Intake(
            bus,
            self._replies,
            names,
            settings.inbox_prefixes,
            settings.uploads,
            catalog,
            self._lifecycle,
            PassingOn(bus, names, self.fleet, self.flights, self.metrics, router_id),
            self._calls,
            kinds,
            terminals,
            self.metrics,
            self._part,
            self._listing,
            keys,
            self._viewers,
            self._traces,
            self.ends,
        )
        self._guardianship = Guardianship(
            bus,
            self._replies,
            names,
            settings.inbox_prefixes,
            self.fleet,
            self.flights,
            self._lifecycle,
            attempts,
            workers,
            router_id,
            self._part,
        )
        recovery = Recovery(self.fleet, self.flights, attempts, self._lifecycle, self.metrics, router_id)
        self._watch = FleetWatch(
            bus,
            names,
            self.fleet,
            recovery,
            self._lifecycle,
            self.metrics,
            self._part,
            self._named,
            lambda: self.flights.owners() | attempts.unanswered(),
        )

    def __repr__(self) -> str:
        return f"<Router {self.fleet!r} {self._lifecycle!r}>"

    @property
    def unready_reason(self) -> str:
        """The reason for which no request can be placed; empty while the router is ready."""
        if not self._bus.is_connected:
            return "there is no connection to the broker"
        if not any(True for _ in self.fleet.models()):
            return "no worker is known"
        return "" if self._intake.is_open else "it takes no requests"

    def update_gauges(self) -> None:
        """Brings the gauges up to date; called before each scrape."""
        gauges = self.metrics
        gauges.ready.set(not self.unready_reason)
        if self.usage is not None:
            self.usage.show()
        gauges.in_flight.set(len(self.flights))
        gauges.tokenization_cache_bytes.set(self._pieces.num_bytes)
        gauges.fleet_viewers.set(len(self._viewers))
        gauges.upload_bytes.set(self._intake.parts.held_bytes + self._workers.receiver.held_bytes)
        gauges.queue_limit.set(self._queue.max_requests)
        for family in (
            gauges.queue_depth,
            gauges.held,
            gauges.workers,
            gauges.event_logs,
            gauges.index_blocks,
            gauges.index_bytes,
            gauges.transfer_rate,
        ):
            family.clear()
        gauges.show_models({model for model, _ in self.fleet.models()}, self.fleet.known_models())
        for model, depth in self._queue.depths().items():
            gauges.queue_depth.labels(model).inc(depth)  # models without a label of their own share one
        for model, held in self._loads.num_held().items():
            gauges.held.labels(model).inc(held)
        for model, workers in self.fleet.models():
            blocks = self.fleet.model(model).num_blocks
            gauges.index_blocks.labels(model).inc(blocks)
            gauges.index_bytes.labels(model).inc(blocks * _INDEX_BYTES_PER_BLOCK)
            gauges.transfer_rate.labels(model).set(self.fleet.model(model).transfer_mb_per_s)
            for worker in workers:
                gauges.workers.labels(model, worker.shown_state(time.monotonic())).inc()
                gauges.event_logs.labels(model, worker.event_state).inc()

    def _stats(self, now: float) -> messages.RouterStats:
        """Returns this router's state, as viewers of the fleet see it."""
        return codec.replace(
            self._catalog.stats(now),
            throttled=self._quota.num_throttled,
            shares_limits=self._quota.is_sharing,
            usage_unsaved_s=0.0 if self.usage is None else round(self.usage.unsaved_s, 1),
            usage_problem="" if self.usage is None else self.usage.problem,
            audit_queued=0 if self.audit is None else len(self.audit),
            audit_lost=0 if self.audit is None else self.audit.num_lost,
        )

    def _limits_seen_by(self, tenant: str, key_id: str, is_operator: bool) -> list[messages.ClientLimits]:
        return self._quota.seen_by(tenant, key_id, is_operator=is_operator)

    def _queued(self) -> list[messages.ModelQueue]:
        """Returns the models of which requests wait here."""
        waiting, held = self._queue.depths(), self._loads.num_held()
        return [
            messages.ModelQueue(model, waiting.get(model, 0), held.get(model, 0), self._loads.progress_of(model))
            for model in sorted({model for model, depth in (waiting | held).items() if depth})
        ]

    def update_settings(self, settings: RouterSettings) -> None:
        """Applies the settings that may change while the router serves, and ignores the others."""
        self._queue.update_settings(settings.policy, settings.temperature, settings.queue)
        self._loads.hold_s = settings.hold_s
        self._limits.set_limits(settings.tenant_limits, settings.tenant_limit_overrides)
        self._telemetry.settings = settings.request_log

    async def open(self) -> None:
        """Discovers the workers, then starts to receive requests."""
        await self._watch.open()
        await self._workers.open()
        await self._quota.open()
        await self._guardianship.open()
        await self._listing.open()
        await self._intake.open()
        self._opened.set()

    def _named(self, name: str, *, is_model: bool) -> None:
        """Serves another name of this router's part: that of a model, or of a model with an adapter."""
        tasks.background("serve a model", self._serve(name, is_model=is_model))

    async def _serve(self, name: str, *, is_model: bool) -> None:
        if is_model:
            await self._watch.hear(name)
        await self._opened.wait()
        if is_model:
            await self._guardianship.hear(name)
            await self._listing.hear(name)
            await self._intake.hear_cancels(name)
        await self._intake.hear(name)

    async def run(self) -> None:
        """Watches the fleet, and takes part in limits, until cancelled."""
        await asyncio.gather(self._watch.watch(), self._quota.run())

    async def stop_intake(self) -> None:
        """Stops receiving requests, and guarding those that workers have."""
        await self._guardianship.close()
        await self._listing.close()
        await self._intake.close()

    async def drain(self) -> None:
        """Returns once every request has been accepted by a worker or has ended."""
        await self._lifecycle.drain()
        await self._calls.drain()

    async def shut_down(self) -> None:
        """Hands over or ends every request that no worker has. The router sends nothing afterwards."""
        await self._lifecycle.shut_down(self._guardianship.offer)
        await self._calls.shut_down()
        self._workers.receiver.stop()
        self._replies.send_pending()


async def serve(settings: RouterSettings, read_settings: Callable[[], RouterSettings]) -> None:
    """Runs a router until SIGTERM or SIGINT; `read_settings` is called on SIGHUP.

    Raises ConnectionError if there is no broker, and StoppedError if a signal arrives before one is found."""
    stop = asyncio.Event()
    router_id = settings.router_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    structlog.contextvars.bind_contextvars(router_id=router_id)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(signals.on_stop(stop.set))
        connection = await signals.unless_stopped(stop, nats.connect(settings.broker, name=f"router {router_id}"))
        stack.push_async_callback(connection.close)
        names = subjects.Subjects(settings.prefix)
        tracer = await stack.enter_async_context(tracing.exporting(settings.otlp_traces_endpoint, "router", router_id))
        keys = settings.key_settings.watch(connection, settings.prefix) if settings.key_settings.are_used else None
        bucket = Bucket(connection, bucket_name(settings.prefix, "quota"))
        checks = None if keys is None else KeyChecks(keys.ring)
        router = Router(connection, names, router_id, settings, random.Random(), tracer, checks, bucket)
        page = metrics.MetricsCollector(router.metrics.families(), router.update_gauges)
        shown = status.serving(settings.status_page, page.registry, lambda: router.unready_reason)
        await stack.enter_async_context(shown)
        if keys is not None:
            await keys.open()
        await router.open()
        signals.on_hangup(read_settings, router.update_settings)
        tasks.background("probe the broker", ping_probe.warn_if_slow(settings.broker))
        structlog.get_logger().info("router_ready", policy=settings.policy)
        watched = [] if keys is None else [keys.watch()]
        if settings.usage:
            usage = _count_usage(settings, connection, router)
            stack.push_async_callback(usage.close)
            stack.callback(tasks.background("keep usage", usage.run()).cancel)  # a router can do without
        if settings.audit_settings.audit:
            writing = audit_log.writing(connection, settings.prefix, settings.audit_settings)
            router.audit = await stack.enter_async_context(writing)
            audit_ends(router.ends, router.audit, router.metrics.audit_records)
        keeper = CopyKeeper(_buckets(settings, connection, bucket), router.metrics.bucket_copies_missing)
        stack.callback(tasks.background("keep copies of buckets", keeper.run()).cancel)
        await _run(settings, connection, router, stop, watched)


def _buckets(settings: RouterSettings, connection: nats.Connection, quota: Bucket) -> list[StreamContents]:
    """Returns all that a router may keep in the broker."""
    found: list[StreamContents] = [quota, *settings.key_settings.buckets(connection, settings.prefix)]
    if settings.usage:
        found.append(Bucket(connection, bucket_name(settings.prefix, usage_store.BUCKET)))
    if settings.audit_settings.audit:
        found.append(audit_log.AuditLog(connection, settings.prefix))
    return found


def _count_usage(settings: RouterSettings, connection: nats.Connection, router: Router) -> UsageWriter:
    """Has a router count what its requests use."""
    bucket = Bucket(connection, bucket_name(settings.prefix, usage_store.BUCKET))
    writer = UsageWriter(bucket, secrets.token_hex(6), settings.usage_days, random.Random())
    router.usage = UsageRecorder(writer, router.metrics, router.fleet.has_known)
    router.ends.add(router.usage.record, hears_refusals=True)
    return writer


async def _run(
    settings: RouterSettings,
    bus: OwnedBus,
    router: Router,
    stop: asyncio.Event,
    watched: Sequence[Coroutine[Any, Any, None]],
) -> None:
    running: list[asyncio.Task[None]] = [tasks.awaited(one) for one in (router.run(), bus.wait_closed(), *watched)]
    stopped = tasks.awaited(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            if task.done():
                task.result()
        await router.stop_intake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await router.drain()
        await router.shut_down()
    finally:
        stopped.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(stopped, *running, return_exceptions=True)
