"""Measures what a router and a broker cost by the number of workers: CPU and memory, without requests and with them.

Run: .venv/bin/python -m bench.router.scale [--workers 125 250 500 1000 2000] [--windows 7] [--seconds 5] [--plot FILE]
     .venv/bin/python -m bench.router.scale --workers 2000 --minutes 10

Workers are generated (`bench.router.generated_workers`), router and broker are real. For each number of workers,
windows without requests and windows with `--rate` requests a second alternate; a request has 512 token ids, its answer
16 tokens in steps of 50 ms. `--plot` draws the medians. With `--minutes`, one window is that long, with requests, and
the workers that the router gives up in it are counted: none has gone. Every window, and every error, is printed."""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from bench import flags
from bench.paired import Ratio, quartiles
from bench.router import generated_workers
from bench.router.generated_workers import MODEL, NAMES, Cores, GeneratedSystem, Style
from bench.system import resident_mib
from tokenbus.replay.svg import Axis, Series, line_chart

_COUNTS = (125, 250, 500, 1_000, 2_000)
_PROMPT_TOKENS, _MAX_TOKENS = 512, 16
_VOCABULARY = 32_000


class _Part(msgspec.Struct):
    """The fields of a chunk that are read here."""

    tokens: int
    finish_reason: str | None
    error: dict[str, object] | None = None


class _Client:
    """Sends requests at a rate, whether earlier ones are answered or not, and counts how they end."""

    def __init__(self, bus: Nats) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        """Requests by finish reason or error."""
        self.num_sent = 0
        self.firsts_s: list[float] = []
        """Seconds to the first token of each request."""
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._sent_at: dict[str, float] = {}
        self._parts = msgspec.json.Decoder(_Part)

    async def listen(self) -> None:
        await self._bus.subscribe(f"{self._inbox}.*", cb=self._take)

    async def send(self, rate: float) -> None:
        """Sends until it is cancelled."""
        began = time.perf_counter()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            reply = f"{self._inbox}.{self.num_sent}"
            self.num_sent += 1
            ids = random.choices(range(_VOCABULARY), k=_PROMPT_TOKENS)
            self._sent_at[reply] = time.perf_counter()
            body = json.dumps({"token_ids": ids, "max_tokens": _MAX_TOKENS, "ignore_eos": True}).encode()
            await self._bus.publish(NAMES.generate(MODEL), body, reply)

    @property
    def num_open(self) -> int:
        return self.num_sent - self.ends.total()

    async def _take(self, message: Msg) -> None:
        part = self._parts.decode(message.data)
        if part.tokens and (sent_at := self._sent_at.pop(message.subject, None)) is not None:
            self.firsts_s.append(time.perf_counter() - sent_at)
        if part.finish_reason is not None:
            self.ends[str(part.error["code"]) if part.error else part.finish_reason] += 1


@contextlib.asynccontextmanager
async def _requests(client: _Client, rate: float) -> AsyncIterator[None]:
    """Sends requests meanwhile, and waits for the end of all that were sent."""
    sending = asyncio.create_task(client.send(rate))
    try:
        await asyncio.sleep(2.0)  # until as many streams run as will run on the average
        yield
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while client.num_open:
                    await asyncio.sleep(0.05)


class Point(NamedTuple):
    """Cores for one number of workers."""

    workers: int
    idle: list[Cores]
    busy: list[Cores]


async def _point(one: GeneratedSystem, client: _Client, workers: int, options: argparse.Namespace) -> Point:
    point = Point(workers, [], [])
    for number in range(options.windows):
        point.idle.append(await one.cores(options.seconds))
        async with _requests(client, options.rate):
            point.busy.append(await one.cores(options.seconds))
        print(f"  window {number + 1}: idle {_plain(point.idle[-1])}, busy {_plain(point.busy[-1])}", flush=True)
    return point


def _plain(cores: Cores) -> str:
    return f"router {cores.router:.3f} broker {cores.broker:.3f}"


async def _long(one: GeneratedSystem, client: _Client, options: argparse.Namespace) -> None:
    """Measures one long window, a minute at a time."""
    minutes: list[Cores] = []
    async with _requests(client, options.rate):
        for _ in range(options.minutes):
            minutes.append(await one.cores(60.0))
            print(f"  minute {len(minutes)}: {_plain(minutes[-1])}, {one.num_lost} workers lost so far", flush=True)
    router, broker = (quartiles([minute[at] for minute in minutes]) for at in (0, 1))
    print(
        f"{options.minutes} minutes: router {_spread(router)}, broker {_spread(broker)} of a core; {one.num_lost} lost"
    )


def _spread(seen: Ratio) -> str:
    return f"{seen.median:.3f} ({seen.first_quartile:.3f} to {seen.third_quartile:.3f})"


def _table(points: Iterable[Point]) -> str:
    lines = ["| workers | router, idle | broker, idle | router, busy | broker, busy |", "|---|---|---|---|---|"]
    for point in points:
        columns = [[cores[at] for cores in seen] for seen in (point.idle, point.busy) for at in (0, 1)]
        lines.append(f"| {point.workers:,} | " + " | ".join(_spread(quartiles(column)) for column in columns) + " |")
    return "\n".join(lines)


def plot(points: list[Point], rate: int) -> str:
    """Draws the medians over the number of workers."""
    loads = {"idle": [one.idle for one in points], f"{rate} requests/s": [one.busy for one in points]}
    lines = []
    for at, name in enumerate(Cores._fields):
        for load, windows in loads.items():
            medians = [quartiles([cores[at] for cores in seen]).median for seen in windows]
            lines.append(Series(f"{name}, {load}", [(one.workers, y) for one, y in zip(points, medians, strict=True)]))
    return line_chart("A router and a broker beside generated workers", lines, Axis("workers"), Axis("cores"))


async def measure(options: argparse.Namespace) -> None:
    points = []
    for workers in options.workers:
        fleet = generated_workers.processes(workers, options.per_process, Style())
        async with generated_workers.beside(fleet, workers) as one:
            print(f"{workers} workers, {options.per_process} of a process", flush=True)
            bus = Nats()
            await bus.connect(one.url)
            client = _Client(bus)
            await client.listen()
            if options.minutes:
                await _long(one, client, options)
            else:
                points.append(await _point(one, client, workers, options))
            firsts = sorted(client.firsts_s)
            print(
                f"  {client.num_sent} requests: {dict(client.ends)}, {client.num_open} without an end; first token p50 "
                f"{1e3 * firsts[len(firsts) // 2]:.0f} ms, p99 {1e3 * firsts[len(firsts) * 99 // 100]:.0f} ms; "
                f"{one.num_lost} workers lost; router {resident_mib(one.router_pid):.0f} MiB, broker "
                f"{resident_mib(one.broker_pid):.0f} MiB",
                flush=True,
            )
            await bus.close()
    if points:
        print(_table(points))
        if options.plot is not None:
            options.plot.write_text(plot(points, options.rate))


def main() -> None:
    parser = flags.parser(__doc__, per_process=8, windows=7, seconds=5, rate=100, minutes=0)
    parser.add_argument("--workers", type=int, nargs="+", default=_COUNTS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians into this SVG file")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
