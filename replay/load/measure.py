"""One run: warms up, puts the load of one point on the system, and shows how far it is."""

import asyncio
import contextlib
import itertools
import math
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator

from tokenbus.client import Client
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.errors import Code
from tokenbus.replay.load.arrivals import timed
from tokenbus.replay.load.load import Sender, closed_loop, open_loop
from tokenbus.replay.load.options import Plan
from tokenbus.replay.load.points import Kind, Point
from tokenbus.replay.load.table import progress
from tokenbus.replay.load.tally import Tally
from tokenbus.replay.load.workload import Workload

_REFUSALS = {Code.INVALID_REQUEST, Code.PROMPT_TOO_LONG, Code.UNSUPPORTED, Code.MODEL_NOT_FOUND, Code.PAYLOAD_TOO_LARGE}
"""Errors of the requests themselves: more of them would tell no more."""
_SHOW_EVERY_S = 0.5


async def warm_up(client: Client, plan: Plan, workload: Workload, point: Point) -> None:
    """Asks without counting. Raises ValueError where every request is refused for what it asks."""
    if not plan.warmup:
        return
    clients = int(point.value) if point.kind is Kind.CONCURRENCY else 1
    sender = Sender(client, plan.model, Tally(time.monotonic()))
    asks = itertools.islice(workload.asks(_common(plan), f"{plan.seed} warm-up"), plan.warmup)
    async with _showing("warm-up", sender.tally, plan.warmup, None):
        await closed_loop(sender, asks, min(clients, plan.warmup), math.inf)
    refused = [code for code in sender.tally.errors if code in _REFUSALS]
    if refused and not sender.tally.finished:
        raise ValueError(f"the first request was refused: {refused[0]}: {sender.tally.examples[refused[0]]}")


async def measure(client: Client, plan: Plan, workload: Workload, point: Point, number: int, tally: Tally) -> None:
    """The `number`-th run; fills the tally."""
    total = plan.requests_at(point, workload)
    until = tally.began_at + plan.duration_s if plan.duration_s else math.inf
    seed = f"{plan.seed} {number}"
    asks = itertools.islice(workload.asks(_common(plan), seed), total)
    sender = Sender(client, plan.model, tally)
    async with _showing(str(point), tally, total, plan.duration_s):
        if point.kind is Kind.CONCURRENCY:
            await closed_loop(sender, asks, int(point.value), until)
        else:
            await open_loop(sender, timed(asks, point, plan.burst, random.Random(seed)), plan.max_in_flight, until)


def _common(plan: Plan) -> messages.GenerateRequest:
    """A salt of its own keeps a run from finding what an earlier one has left in the caches."""
    salt = None if plan.reuse_cache else f"bench-{secrets.token_hex(8)}"
    return messages.GenerateRequest(temperature=plan.temperature, timeout_ms=plan.timeout_ms, cache_salt=salt)


@contextlib.asynccontextmanager
async def _showing(name: str, tally: Tally, total: int | None, duration_s: float | None) -> AsyncIterator[None]:
    """A line on standard error that is written again and again, where somebody sees it."""

    async def show() -> None:
        while True:
            await asyncio.sleep(_SHOW_EVERY_S)
            line = progress(tally, total, duration_s, time.monotonic())
            print(f"\r\x1b[K{name}: {line}", end="", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
