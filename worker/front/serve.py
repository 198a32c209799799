"""The composition root of a worker: makes the parts, starts them in order, and takes them down in reverse."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable

import structlog

from protocol import connection as nats
from protocol import messages, prompt, subjects
from worker import contract
from worker.engine.settings import EngineSettings
from worker.front import link
from worker.front.announce import Announcer
from worker.front.engine import ChildEngine
from worker.front.inbox import Inbox
from worker.front.outbox import Outbox
from worker.front.streams import Streams
from worker.front.supervise import Supervisor

_LOADING_LINE_S = 2.0


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """All settings of one worker."""

    served_name: str
    """The model's name on the wire."""
    engine: EngineSettings
    broker: nats.Settings = dataclasses.field(default_factory=nats.Settings)
    prefix: str = subjects.DEFAULT_PREFIX
    worker_id: str = ""
    """Stable name of this worker; made up from host name and process id where absent."""
    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """What a client's reply subject may begin with."""
    max_waiting: int = 64
    """Accepted requests that may wait for a lane; beyond it requests are refused with `overloaded`."""
    max_new_tokens: int = 1_024
    """Length of a completion that was asked for without `max_tokens`."""
    grace_s: float = 30.0
    """How long running streams may go on after SIGTERM."""
    debug: bool = dataclasses.field(default_factory=lambda: os.environ.get("TOKENBUS_DEBUG", "") not in ("", "0"))
    """Hold every stream against the engine contract (variable TOKENBUS_DEBUG)."""


class Front:
    """A worker's front: joins engine, streams and announcements together as engines come and go."""

    def __init__(self, announcer: Announcer, streams: Streams, outbox: Outbox, inbox: Inbox) -> None:
        self._announcer = announcer
        self._streams = streams
        self._outbox = outbox
        self._inbox = inbox
        self.leaving = False

    def __repr__(self) -> str:
        return f"<Front {self._announcer!r} {self._streams!r}>"

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        bundle = engine.tokenizer_bundle()
        self._streams.use(engine, config)
        self._inbox.use(engine)
        self._announcer.engine_started(engine, config, prompt.digest_of(bundle) if bundle else None)
        if self.leaving:
            self._announcer.set_state(messages.WorkerState.DRAINING)

    def engine_died(self) -> None:
        self._streams.use(None, None)
        self._inbox.use(None)
        self._outbox.flush()
        if not self.leaving:
            self._announcer.engine_died()


async def serve(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT, or until an operator drains it.

    Raises EngineStartError for a model that can't be served and ConnectionError when there is no broker."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    structlog.contextvars.bind_contextvars(worker_id=worker_id)
    async with contextlib.AsyncExitStack() as stack:
        connection = await nats.connect(settings.broker, name=f"worker {worker_id}")
        stack.push_async_callback(connection.close)
        names = subjects.Subjects(settings.prefix)
        announcer = Announcer(connection, names, settings.served_name, worker_id)
        outbox = Outbox(connection, announcer)
        streams = Streams(announcer, outbox, settings.max_new_tokens, settings.inbox_prefixes, validate=settings.debug)
        inbox = Inbox(connection, names, announcer, streams, settings.inbox_prefixes, drain=leave.set)
        front = Front(announcer, streams, outbox, inbox)
        supervisor = Supervisor(_engine_maker(settings, outbox), worker_id, front)
        connection.on_reconnect = announcer.publish_card
        await inbox.open()
        await _run(settings, connection, supervisor, front, announcer, streams, leave)


def _engine_maker(settings: WorkerSettings, outbox: Outbox) -> Callable[[], ChildEngine]:
    def make() -> ChildEngine:
        engine = ChildEngine(lambda: link.spawn(settings.engine), settings.max_waiting)
        engine.on_step = outbox.flush
        engine.on_loading = LoadingLog().note
        return engine

    return make


class LoadingLog:
    """Says how far a model is loaded, every few seconds of a long load."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def note(self, fraction: float) -> None:
        """`fraction` is from 0 to 1."""
        now = time.monotonic()
        if now - self._said_at >= _LOADING_LINE_S:
            self._said_at = now
            structlog.get_logger().info("model_loading", percent=round(100 * fraction))


async def _run(
    settings: WorkerSettings,
    connection: nats.Connection,
    supervisor: Supervisor,
    front: Front,
    announcer: Announcer,
    streams: Streams,
    leave: asyncio.Event,
) -> None:
    background = [asyncio.create_task(task) for task in (announcer.beat(), streams.tick(), connection.until_refused())]
    life = asyncio.create_task(supervisor.run())
    left = asyncio.create_task(leave.wait())
    try:
        await asyncio.wait([life, left, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (life, *background):
            if task.done():
                task.result()
        await _drain(settings, supervisor, front, announcer)
    finally:
        for running in (life, left, *background):
            running.cancel()
        await asyncio.gather(life, left, *background, return_exceptions=True)
        announcer.set_state(messages.WorkerState.STOPPED)


async def _drain(settings: WorkerSettings, supervisor: Supervisor, front: Front, announcer: Announcer) -> None:
    """Takes nothing new, lets what runs finish within the grace period, ends the rest."""
    log = structlog.get_logger()
    front.leaving = True
    announcer.set_state(messages.WorkerState.DRAINING)
    log.info("draining", grace_s=settings.grace_s)
    engine = supervisor.engine
    if engine is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await engine.drain()
    await supervisor.cleanup()
    log.info("drained")
