"""The composition root of `tokenbus auth`: creates the parts, starts them in order, and stops them in reverse."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from tokenbus.auth import seeds as auth_seeds
from tokenbus.auth.answers import CalloutAnswers
from tokenbus.auth.brokers import Brokers
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.auth.connection_caps import ConnectionCaps
from tokenbus.auth.doorkeeper import Doorkeeper
from tokenbus.auth.instance import Instance
from tokenbus.auth.revocations import Revocations
from tokenbus.auth.seeds import Seeds
from tokenbus.auth.settings import AuthSettings
from tokenbus.protocol import tasks
from tokenbus.protocol.access import audit_log
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.key_source import BUCKET
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bus import OwnedBus
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import metrics, status


async def serve(settings: AuthSettings, read_settings: Callable[[], AuthSettings]) -> None:
    """Answers brokers until SIGTERM or SIGINT.

    Raises ConnectionError if there is no broker, ValueError if the seeds can't be read or no port is free, and
    StoppedError if a signal arrives before it has found a broker."""
    stop = asyncio.Event()
    seeds = auth_seeds.read(settings.seeds)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(signals.on_stop(stop.set))
        system = await signals.unless_stopped(stop, nats.connect(settings.system_broker, name="auth-system"))
        stack.push_async_callback(system.close)
        connection = system  # which keys in a file don't need
        if settings.key_settings.keys == BUCKET or settings.audit_settings.audit:
            connection = await signals.unless_stopped(stop, nats.connect(settings.broker, name="auth"))
            stack.push_async_callback(connection.close)
        measured = CalloutMetrics()
        ring = await stack.enter_async_context(answering(system, connection, settings, seeds, measured))
        page = AuthPage(system, ring, measured)
        collector = metrics.MetricsCollector(measured.families(), page.update_gauges)
        serving = status.serving(settings.status_page, collector.registry, page.unready_reason, page.describe)
        await stack.enter_async_context(serving)
        signals.on_hangup(read_settings, lambda _: None)  # of which only the log's level changes
        structlog.get_logger().info("auth_ready", issuer=seeds.signer.public, num_known=len(ring))
        await _until_stopped(stop, {system, connection})


@contextlib.asynccontextmanager
async def answering(
    system: nats.Connection,
    connection: nats.Connection,
    settings: AuthSettings,
    seeds: Seeds,
    measured: CalloutMetrics,
) -> AsyncIterator[KeyRing]:
    """Answers brokers, and closes connections, while the block runs; yields the keys that are known.

    Brokers ask over `system`; keys are read, and the audit log is written, over `connection`."""
    account, prefix = settings.account, settings.prefix
    async with contextlib.AsyncExitStack() as stack:
        writer: AuditWriter | None = None
        if settings.audit_settings.audit:
            writing = audit_log.writing(connection, prefix, settings.audit_settings)
            writer = await stack.enter_async_context(writing)
            audit_log.count_records(writer, measured.audit_records)
        watch = settings.key_settings.watch(connection, prefix)
        await watch.open()
        instance = Instance(Brokers(system, account), watch.ring, prefix, measured, writer)
        revocations, caps = Revocations(instance), ConnectionCaps(instance)
        await revocations.open()
        await caps.open()
        doorkeeper = Doorkeeper(instance, seeds, CalloutAnswers(seeds, account), caps)
        works = (("keys", watch.watch()), ("revocations", revocations.watch()))
        running = [tasks.background(name, work) for name, work in works]
        await doorkeeper.open()
        await system.flush()  # from now on brokers know that somebody answers
        try:
            yield watch.ring
        finally:
            await doorkeeper.close()
            for task in running:
                task.cancel()


async def _until_stopped(stop: asyncio.Event, connections: set[nats.Connection]) -> None:
    """Returns once `stop` is set. Raises ConnectionError if a broker closes a connection for good."""
    waiting = [tasks.awaited(stop.wait()), *(tasks.awaited(one.wait_closed()) for one in connections)]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class AuthPage:
    """The status page of one instance."""

    def __init__(self, system: OwnedBus, ring: KeyRing, measured: CalloutMetrics) -> None:
        self._system = system
        self._ring = ring
        self._metrics = measured

    def __repr__(self) -> str:
        return f"<AuthPage {self._ring!r}>"

    def update_gauges(self) -> None:
        self._metrics.known_keys.set(len(self._ring))
        self._metrics.silent.set(self._ring.silent_s(time.monotonic()))

    def unready_reason(self) -> str:
        if not self._system.is_connected:
            return "the broker can't be reached"
        return "the store of keys can't be reached" if self._ring.is_silent(time.monotonic()) else ""

    def describe(self) -> dict[str, Any]:
        return {"keys": {"known": len(self._ring), "silent": self._ring.is_silent(time.monotonic())}}
