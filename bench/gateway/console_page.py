"""Measures the console's page in a real browser beside a large fleet, and what open pages cost gateway and router.

Run: .venv/bin/python -m bench.gateway.console_page [--workers 2000] [--viewers 5] [--seconds 10] [--events 20]

The extra `browser` and Debian's chromium are needed. Workers are generated (`bench.router.generated_workers`), and
`--streams` of them change in every digest, since they have a stream. First paint is the browser's own figure of a page
that it has not seen before; the main thread's share is that of its tasks while digests come. An event is a worker that
joins: the time from its start, which takes 0.2 s, until the page has the line about it."""

import argparse
import asyncio
import contextlib
import statistics
import time
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench import flags, system
from bench.paired import quartiles
from bench.router import generated_workers
from bench.router.generated_workers import MODEL, GeneratedSystem, Process, Style
from tests.browser.test_console import browser
from tests.support.ports import free_port
from tokenbus.client.wire.wire_client import WireClient

_VIEWPORT: Any = {"width": 1280, "height": 800}
_SETTLE_S = 3.0
_WATCH = """() => {
  window.seen = {};
  const note = () => { for (const line of document.querySelectorAll("#events li")) {
    const name = /late-\\d+/.exec(line.textContent);
    if (name && !(name[0] in window.seen)) window.seen[name[0]] = Date.now();
  } };
  new MutationObserver(note).observe(document.querySelector("#events"), {childList: true, subtree: true});
}"""
_PAINTS = """() => performance.getEntriesByName("first-contentful-paint")[0].startTime"""
_BYTES = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter((one) => !one.name.endsWith("/stream")).reduce((sum, one) => sum + one.encodedBodySize, 0)"""


@contextlib.asynccontextmanager
async def _gateway(one: GeneratedSystem) -> AsyncIterator[tuple[str, int]]:
    port = free_port()
    log = one.router_log.parent / "gateway.log"
    process = system.start(log, "gateway", "--nats", one.url, "--port", str(port))
    try:
        await system.until_listening(port)
        yield f"http://127.0.0.1:{port}/console/", process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


async def _streams(url: str, count: int) -> None:
    """Keeps every worker busy with a stream, until it is cancelled."""
    async with await WireClient.connect(url) as client, asyncio.TaskGroup() as group:

        async def endless() -> None:
            while True:
                async for _ in client.generate(MODEL, token_ids=[7] * 16, max_tokens=4_000, ignore_eos=True):
                    pass

        for _ in range(count):
            group.create_task(endless())
            await asyncio.sleep(0.002)


async def _viewer(url: str) -> None:
    """Reads the events of a page, until it is cancelled."""
    at = urllib.parse.urlsplit(f"{url}stream")
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def _viewers_cost(one: GeneratedSystem, url: str, gateway_pid: int, options: argparse.Namespace) -> None:
    """Compares the CPU time of the gateway and the router with and without open pages, in turn."""
    pids = (gateway_pid, one.router_pid)
    without: list[list[float]] = []
    beside: list[list[float]] = []
    for _ in range(options.pairs):
        for costs, count in ((without, 0), (beside, options.viewers)):
            viewers = [asyncio.create_task(_viewer(url)) for _ in range(count)]
            await asyncio.sleep(_SETTLE_S)
            before, began = [system.cpu_seconds(pid) for pid in pids], time.perf_counter()
            await asyncio.sleep(options.seconds)
            took_s = time.perf_counter() - began
            costs.append([(system.cpu_seconds(pid) - used) / took_s for pid, used in zip(pids, before, strict=True)])
            for viewer in viewers:
                viewer.cancel()
    for at, name in enumerate(("gateway", "router")):
        more = quartiles([100 * (second[at] - first[at]) for first, second in zip(without, beside, strict=True)])
        alone = 100 * statistics.median(costs[at] for costs in without)
        print(f"  {name}: {alone:.1f} % of a core, and {more} % more with {options.viewers} pages", flush=True)


async def _page(browsing: Any, url: str, options: argparse.Namespace) -> Any:
    """Opens the page in several fresh contexts, and returns the last one."""
    paints = []
    for _ in range(options.pairs):
        context = await browsing.new_context(viewport=_VIEWPORT)
        page = await context.new_page()
        await page.goto(url)
        await page.locator("#workers tbody tr").nth(5).wait_for()
        paints.append(await page.evaluate(_PAINTS))
        if len(paints) < options.pairs:
            await context.close()
    print(f"  first paint {quartiles(paints)} ms; all files {await page.evaluate(_BYTES):,} bytes")
    return page


async def _main_thread(page: Any, seconds: float) -> None:
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")

    async def busy_s() -> float:
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    await asyncio.sleep(_SETTLE_S)
    before, began = await busy_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (await busy_s() - before) / (time.perf_counter() - began)
    print(f"  the page's main thread is busy for {100 * share:.1f} % of {seconds} s", flush=True)


async def _events(page: Any, url: str, count: int) -> None:
    await page.evaluate(_WATCH)
    host, _, port = url.rpartition("//")[2].rpartition(":")
    began: dict[str, float] = {}
    living: list[asyncio.Task[None]] = []
    for number in range(count):
        name = f"late-{number}"
        process = Process(name, [name], Style())
        began[name] = 1e3 * time.time()
        living.append(asyncio.create_task(process.live(host, int(port))))
        await asyncio.sleep(0.7)
    async with asyncio.timeout(20):
        while len(seen := await page.evaluate("() => window.seen")) < count:
            await asyncio.sleep(0.2)
    delays = sorted(seen[name] - started for name, started in began.items())
    for one in living:
        one.cancel()
    print(
        f"  a worker that joins is on the page after {statistics.median(delays):.0f} ms (p50), "
        f"{delays[int(0.95 * (count - 1))]:.0f} ms (p95), {delays[-1]:.0f} ms at most, of {count}"
    )


async def measure(options: argparse.Namespace) -> None:
    fleet: Sequence[Process] = generated_workers.processes(options.workers, options.per_process, Style())
    async with generated_workers.beside([*fleet], options.workers) as one, _gateway(one) as (url, gateway_pid):
        print(f"{options.workers} workers, {options.streams} streams")
        streaming = asyncio.create_task(_streams(one.url, options.streams))
        await asyncio.sleep(_SETTLE_S)
        await _viewers_cost(one, url, gateway_pid, options)
        async with browser() as browsing:
            page = await _page(browsing, url, options)
            await _main_thread(page, options.seconds)
            await _events(page, one.url, options.events)
        streaming.cancel()
        await asyncio.wait([streaming])


if __name__ == "__main__":
    parser = flags.parser(__doc__, workers=2_000, per_process=8, viewers=5, seconds=10, pairs=7, events=20, streams=50)
    asyncio.run(measure(parser.parse_args()))
