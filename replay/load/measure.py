"""Measures one point of a sweep: warms up, sends the load, and shows progress."""

import asyncio
import contextlib
import itertools
import math
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import tasks
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.errors import Code
from tokenbus.replay.load.points import LoadKind, LoadPoint, Plan, schedule
from tokenbus.replay.load.sender import Sender, closed_loop, open_loop
from tokenbus.replay.load.stats import RunStats
from tokenbus.replay.load.table import progress
from tokenbus.replay.load.workload import Workload

_REQUEST_ERRORS = {
    Code.INVALID_REQUEST,
    Code.PROMPT_TOO_LONG,
    Code.UNSUPPORTED,
    Code.MODEL_NOT_FOUND,
    Code.PAYLOAD_TOO_LARGE,
}
"""Errors that every further request would get as well."""
_SHOW_EVERY_S = 0.5


async def warm_up(client: WireClient, plan: Plan, workload: Workload, point: LoadPoint) -> None:
    """Sends requests that are not counted. Raises ValueError if all of them are refused as invalid."""
    if not plan.warmup:
        return
    clients = int(point.value) if point.kind is LoadKind.CONCURRENCY else 1
    sender = Sender(client, plan.model, RunStats(time.monotonic()))
    requests = itertools.islice(workload.generate(_common(plan), f"{plan.seed} warm-up"), plan.warmup)
    async with _show_progress("warm-up", sender.stats, plan.warmup, None):
        await closed_loop(sender, requests, min(clients, plan.warmup), math.inf)
    refused = [code for code in sender.stats.errors if code in _REQUEST_ERRORS]
    if refused and not sender.stats.finished:
        raise ValueError(f"the first request was refused: {refused[0]}: {sender.stats.examples[refused[0]]}")


async def measure(
    client: WireClient, plan: Plan, workload: Workload, point: LoadPoint, number: int, stats: RunStats
) -> None:
    """Measures the `number`-th point of the sweep into `stats`."""
    total = plan.requests_at(point, workload)
    until = stats.began_at + plan.duration_s if plan.duration_s else math.inf
    seed = f"{plan.seed} {number}"
    requests = itertools.islice(workload.generate(_common(plan), seed), total)
    sender = Sender(client, plan.model, stats)
    async with _show_progress(str(point), stats, total, plan.duration_s):
        if point.kind is LoadKind.CONCURRENCY:
            await closed_loop(sender, requests, int(point.value), until)
        else:
            await open_loop(
                sender, schedule(requests, point, plan.burst, random.Random(seed)), plan.max_in_flight, until
            )


def _common(plan: Plan) -> messages.GenerateRequest:
    """Returns the fields common to all requests. A cache salt keeps a run from hitting what earlier ones have
    cached."""
    salt = None if plan.reuse_cache else f"bench-{secrets.token_hex(8)}"
    return messages.GenerateRequest(temperature=plan.temperature, timeout_ms=plan.timeout_ms, cache_salt=salt)


@contextlib.asynccontextmanager
async def _show_progress(
    name: str, stats: RunStats, total: int | None, duration_s: float | None
) -> AsyncIterator[None]:
    """Updates a line on standard error while the body runs, if that is a terminal."""

    async def show() -> None:
        while True:
            await asyncio.sleep(_SHOW_EVERY_S)
            line = progress(stats, total, duration_s, time.monotonic())
            print(f"\r\x1b[K{name}: {line}", end="", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield
        return
    task = tasks.awaited(show())
    try:
        yield
    finally:
        task.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
