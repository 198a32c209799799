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

import msgspec
import structlog

from protocol import connection as nats
from protocol import subjects
from protocol.bus import Bus
from worker.engine.settings import EngineSettings
from worker.front import link
from worker.front.engine import ChildEngine
from worker.front.front import Front, FrontSettings
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
    front: FrontSettings = dataclasses.field(default_factory=FrontSettings)
    max_waiting: int = 64
    """Accepted requests that may wait for a lane; beyond it requests are refused with `overloaded`."""
    grace_s: float = 30.0
    """How long running streams may go on after SIGTERM."""
    step_timeout_s: float = 30.0
    """An engine whose step takes longer, and ten times as long as any before, is ended as a crash."""


async def serve(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT, or until an operator drains it.

    Raises EngineStartError for a model that can't be served, ReplacedError when another worker has taken the name, and
    ConnectionError when there is no broker."""
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    structlog.contextvars.bind_contextvars(worker_id=worker_id)
    async with contextlib.AsyncExitStack() as stack:
        connection = await nats.connect(settings.broker, name=f"worker {worker_id}")
        stack.push_async_callback(connection.close)
        names = subjects.Subjects(settings.prefix)
        front = Front(connection, names, settings.served_name, worker_id, settings.front)
        supervisor = Supervisor(_engine_maker(settings, front), worker_id, front, settings.step_timeout_s)
        front.on_pulse = supervisor.watch
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, front.drain_asked.set)
        await front.open()
        await _run(settings, connection, supervisor, front)


def _engine_maker(settings: WorkerSettings, front: Front) -> Callable[[], ChildEngine]:
    def make() -> ChildEngine:
        launched = msgspec.structs.replace(settings.engine, files=front.files)
        engine = ChildEngine(lambda: link.spawn(launched), settings.max_waiting, keeps_streams=True)
        engine.on_step = front.step_done
        engine.on_blocks = front.blocks_changed
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


async def _run(settings: WorkerSettings, bus: Bus, supervisor: Supervisor, front: Front) -> None:
    lives = (supervisor.run(), front.run(), bus.until_refused())
    tasks: list[asyncio.Task[None]] = [asyncio.create_task(life) for life in lives]
    left = asyncio.create_task(front.drain_asked.wait())
    try:
        await asyncio.wait([left, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        await _drain(settings, supervisor, front)
    finally:
        left.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(left, *tasks, return_exceptions=True)
        front.left()


async def _drain(settings: WorkerSettings, supervisor: Supervisor, front: Front) -> None:
    """Takes nothing new, lets what runs finish within the grace period, ends the rest."""
    log = structlog.get_logger()
    front.leave()
    log.info("draining", grace_s=settings.grace_s)
    engine = supervisor.engine
    if engine is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await engine.drain()
    await supervisor.cleanup()
    log.info("drained")
