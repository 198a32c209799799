"""Measures the cost of metrics and logs at 64 streams.

Run: .venv/bin/python -m bench.serving.observability [--streams 64] [--pairs 9]

Two whole systems with the demo model take turns (A B A B). A is as shipped: all counters and histograms, its pages
scraped every five seconds, one start and one end line in the log per request, in router and worker. B is the same code
with counting and logging removed (`unwatched/`). The results are throughput and the CPU time of router, frontend and
engine per token, as the kernel counts it. The demo model makes a token in microseconds, so its frontend is as busy as
one can be; with a larger model the same costs are a smaller share."""

import asyncio
import contextlib
import os
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from bench import flags, system
from tokenbus.client import Client
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_TOKENS = 100
_REQUESTS = 8
"""Requests of each stream in a round, one after another."""
_SCRAPE_S = 5.0
_UNWATCHED = Path(__file__).parent / "unwatched"
REQUEST = messages.GenerateRequest(prompt="Once upon a time", max_tokens=_TOKENS, temperature=0, ignore_eos=True)


class Cost(NamedTuple):
    cpu_us: float
    """CPU time per token, in all processes of the system."""
    front_us: float
    """CPU time per token of router and frontend, which count and log. Most of the rest is llama.cpp's."""
    tokens_per_s: float


class Watched:
    """One of the two systems."""

    def __init__(self, client: Client, telling: list[int], engine: int, pages: list[str]) -> None:
        self._client = client
        self._telling = telling
        self._engine = engine
        self._pages = pages

    async def round(self, streams: int) -> Cost:
        told, computed, began = self._told_s(), system.cpu_seconds(self._engine), time.perf_counter()
        scraping = asyncio.create_task(self._scrape())
        await asyncio.gather(*(self._read() for _ in range(streams)))
        spent_s = time.perf_counter() - began
        scraping.cancel()
        tokens = streams * _REQUESTS * _TOKENS
        told, computed = self._told_s() - told, system.cpu_seconds(self._engine) - computed
        return Cost(1e6 * (told + computed) / tokens, 1e6 * told / tokens, tokens / spent_s)

    async def _read(self) -> None:
        for _ in range(_REQUESTS):
            async for chunk in self._client.generate("m", REQUEST):
                if chunk.error:
                    raise SystemExit(f"the system refused: {chunk.error.message}")

    async def _scrape(self) -> None:
        while self._pages:
            for page in self._pages:
                await asyncio.to_thread(_fetch, page)
            await asyncio.sleep(_SCRAPE_S)

    def _told_s(self) -> float:
        return sum(map(system.cpu_seconds, self._telling))


def _fetch(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()


@contextlib.asynccontextmanager
async def running(streams: int, *, watched: bool) -> AsyncIterator[Watched]:
    variables = {} if watched else {"TOKENBUS_LOG": "error", "PYTHONPATH": str(_UNWATCHED)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    settings = ["--threads", "1", "--max-num-seqs", str(streams), "--kv-tokens", str(256 * streams)]
    settings += ["--context-length", "256", *(("--metrics-port", "0") if watched else ())]
    own = ("--metrics-port", "0") if watched else ()
    async with system.started(MODEL_PATH, settings, own, variables) as (client, _, router, folder):
        pids = (await system.card(client)).pids
        logs = [folder / "router.log", folder / "worker.log"] if watched else []
        pages = [f"http://127.0.0.1:{system.status_port(log)}/metrics" for log in logs]
        yield Watched(client, [router, pids.front], pids.engine, pages)


async def measure(streams: int, pairs: int) -> None:
    async with running(streams, watched=True) as first, running(streams, watched=False) as second:
        seen: list[tuple[Cost, Cost]] = []
        for number in range(pairs + 1):
            pair = await first.round(streams), await second.round(streams)
            if number:  # the first round warms both up
                seen.append(pair)
    print(f"demo model, {streams} streams, requests of {_TOKENS} tokens, {pairs} pairs")
    for name, place in (("CPU time a token, us", 0), ("of router and frontend", 1), ("tokens a second", 2)):
        with_it, without = (statistics.median(pair[side][place] for pair in seen) for side in (0, 1))
        low, middle, high = statistics.quantiles([one[place] / other[place] for one, other in seen], n=4)
        print(f"  {name:<20} {with_it:8.1f} and without {without:8.1f}: {middle:.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    options = flags.parser(__doc__, streams=64, pairs=9).parse_args()
    asyncio.run(measure(options.streams, options.pairs))


if __name__ == "__main__":
    main()
