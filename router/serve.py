"""The composition root of a router: makes the parts, starts them in order, and takes them down in reverse."""

import asyncio
import contextlib
import dataclasses
import os
import random
import secrets
import signal
import socket
import time

import structlog

from protocol import connection as nats
from protocol import subjects
from router.answer import Answers
from router.dispatch import Dispatch
from router.fleet import Fleet
from router.flight import Flights
from router.intake import Intake
from router.placement import make_policies
from router.vocabularies import Vocabularies
from router.watch import FleetWatch


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """All settings of one router."""

    broker: nats.Settings = dataclasses.field(default_factory=nats.Settings)
    prefix: str = subjects.DEFAULT_PREFIX
    router_id: str = ""
    """Name of this router in logs; made up from host name and process id where absent."""
    policy: str = "least_loaded"
    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """What a client's reply subject may begin with."""
    max_request_bytes: int = 0
    """Largest request; half of what the broker takes where 0."""
    max_flights: int = 16_384
    """Requests held at a time; beyond that they are refused with `overloaded`."""
    grace_s: float = 5.0


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT. Raises ConnectionError when there is no broker."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    router_id = settings.router_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    structlog.contextvars.bind_contextvars(router_id=router_id)
    policies = make_policies()
    if settings.policy not in policies:
        raise ValueError(f"--policy must be one of {', '.join(policies)}, got {settings.policy!r}")
    async with contextlib.AsyncExitStack() as stack:
        connection = await nats.connect(settings.broker, name=f"router {router_id}")
        stack.push_async_callback(connection.close)
        names = subjects.Subjects(settings.prefix)
        fleet = Fleet(time.monotonic())
        flights = Flights(settings.max_flights)
        answers = Answers(connection, router_id)
        vocabularies = Vocabularies(connection, names)
        dispatch = Dispatch(connection, names, fleet, flights, router_id, policies, settings.policy, random.Random())
        most = settings.max_request_bytes or nats.default_max_request_bytes(connection.max_payload)
        intake = Intake(
            connection, names, settings.inbox_prefixes, most, fleet, flights, vocabularies, dispatch, answers
        )
        watch = FleetWatch(connection, names, fleet, flights, answers)
        await watch.open()
        await intake.open()
        structlog.get_logger().info("router_ready", policy=settings.policy)
        watching = asyncio.create_task(watch.watch())
        left = asyncio.create_task(leave.wait())
        refused = asyncio.create_task(connection.until_refused())
        await asyncio.wait([watching, left, refused], return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, refused):
            if task.done():
                task.result()
        await intake.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await intake.drain()
        for running in (watching, left, refused):
            running.cancel()
        await asyncio.gather(watching, left, refused, return_exceptions=True)
