"""Puts mixed load on a whole system for an hour, and tells whether it keeps its memory, descriptors and tasks.

Run: make soak [MINUTES=60], or .venv/bin/python -m bench.serving.soak [--minutes 60] [--rate 4] [--clients 24]

`tokenbus up` serves the demo model with keys, usage, audit log, traces and an adapter, in caches so small that they are
soon full. Clients of three tenants send what the API has: completions and chats of many lengths, tools, constraints,
log probabilities, several choices, embeddings, stored responses, requests that are refused, that time out, whose client
goes away or reads slowly; and they open and close the console. Some clients use NATS.

The load is put on twice: for the first third of the time, at most 25 minutes, to fill what has a bound, and then for
the rest. The run fails if
- a request has another end than an answer or one of the refusals that were asked for, or work is left over at the end;
- a process has more descriptors, threads or asyncio tasks when idle after the second load than when idle after the
  first one;
- the memory of a process grows. Its growth is the median of the slopes between any two samples of the second load, over
  an hour; noise hides what is less than 2 % or 2 MiB in an hour, and twice as much in half an hour. An engine's memory
  goes up and down by 20 MiB with the constraints that it has cached, so the last third has to lie above the second too.
  The broker's may grow by 32 MiB in all: JetStream keeps the block of a stream that it is writing in memory (with
  150,000 messages of 400 bytes to one stream, its private memory rose to 29 MiB with the first 12 MiB, and was 23 MiB
  from 20 to 60)."""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import structlog

from bench import flags, system
from bench.serving.mixed_load import Fleet, Load
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.process.parent import end_with_parent

_LONGEST_WARM_UP_S = 1_500.0
"""At 4 requests a second, as many as the router keeps traces of, and more."""
_GROWTH_AN_HOUR = 0.02
_NOISE_MIB_AN_HOUR = 2.0
_BROKER = "nats-server"
_BROKER_MIB = 32.0
_IDLE_SAMPLES = 5
_IDLE_S = 20.0
"""Time after which no stream is held for a lost client, and no connection is open."""
_CONFIG = """
[router]
usage = true
max-queued-requests = 32
tokenization-cache-mib = 4

[worker]
kv-tokens = 8192
context-length = 1024
host-cache-mib = 32
max-num-seqs = 8
max-waiting = 8
threads = 1

[gateway]
stored-responses-bytes = 1048576
"""


@contextlib.asynccontextmanager
async def serving(sink_port: int, log_path: Path | None) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-soak-") as name:
        folder = Path(name)
        (folder / "config.toml").write_text(_CONFIG)
        adapters = MODEL_PATH.parent / "adapters"
        command = [sys.executable, "-m", "tokenbus.cli.start", "up", "demo", "--json", "--port", "0"]
        command += ["--gateway-port", "0", "--workers", "1", "--keys", "--audit", "--metrics"]
        command += ["--config", str(folder / "config.toml"), "--lora", f"pirate={adapters / 'pirate.gguf'}"]
        command += ["--otlp-traces-endpoint", f"http://127.0.0.1:{sink_port}/v1/traces"]
        log_path = log_path or folder / "up.log"
        with log_path.open("ab") as log:
            up = subprocess.Popen(  # noqa: ASYNC220 - its children are to end with this thread
                command,
                env={**os.environ, "PYTHONSAFEPATH": "1", "XDG_STATE_HOME": name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        try:
            assert up.stdout is not None
            line = await asyncio.to_thread(up.stdout.readline)
            if not line:
                raise SystemExit(log_path.read_text())
            fleet = Fleet(up.pid, json.loads(line), [])
            for tenant, limits in (("a", {}), ("b", {}), ("c", {}), ("d", {"requests_per_minute": 6})):
                made = await fleet.ask("/console/keys", {"tenant": tenant, "limits": limits}, fleet.operator)
                assert made.status == 201, made
                fleet.keys.append(json.loads(made.body)["key"])
            yield fleet
        finally:
            up.terminate()
            up.wait(timeout=60)


class Sample(NamedTuple):
    """The memory, descriptors, threads and tasks of one process."""

    resident_mib: float
    descriptors: int
    threads: int
    tasks: int | None
    """None for a process that does not show its tasks."""


Row = tuple[float, dict[str, Sample]]
"""When samples were taken, in seconds, and those of each process."""


class Watch:
    """Samples of all processes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._began = time.monotonic()
        self.rows: list[Row] = []
        self._shown: list[str] = []

    async def sample(self, remark: str) -> dict[str, Sample]:
        """Takes a sample and prints it."""
        try:
            tasks = await self._fleet.num_tasks()
        except (OSError, IndexError):
            tasks = {}
        found: dict[str, Sample] = {}
        for pid, name in _family(self._fleet.pid):
            with contextlib.suppress(OSError):
                found[name] = _sample(pid, tasks.get(name))
        at = time.monotonic() - self._began
        self.rows.append((at, found))
        if [*found] != self._shown:
            self._shown = [*found]
            print(f"{'min':>5} " + " ".join(f"{name:>16}" for name in found) + "  MiB/descriptors/threads/tasks")
        print(f"{at / 60:5.1f} " + " ".join(f"{_shown(one):>16}" for one in found.values()) + f"  {remark}", flush=True)
        return found

    async def every(self, interval_s: float, ends: collections.Counter[str]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.sample(f"{sum(ends.values())} requests")


def _family(root: int) -> list[tuple[int, str]]:
    """Returns pid and name of a process and of all that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    pids = [root]
    for pid in pids:
        pids += sorted(child for child, parent in parents.items() if parent == pid)
    seen: collections.Counter[str] = collections.Counter()
    named = []
    for pid in pids:
        with contextlib.suppress(OSError):
            name = _name(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"))
            seen[name] += 1
            named.append((pid, name if seen[name] == 1 and name != "worker" else f"{name}-{seen[name]}"))
    return named


def _name(command: list[str]) -> str:
    if "tokenbus.cli.start" in command:
        return command[command.index("tokenbus.cli.start") + 1]
    module = command[command.index("-m") + 1] if "-m" in command else Path(command[0]).name
    name = module.removesuffix(".main").rpartition(".")[2]
    return {"process": "engine", "renderer_process": "renderer"}.get(name, name)


def _sample(pid: int, tasks: int | None) -> Sample:
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return Sample(system.resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd")), threads, tasks)


def _shown(one: Sample) -> str:
    tasks = "-" if one.tasks is None else one.tasks
    return f"{one.resident_mib:.1f}/{one.descriptors}/{one.threads}/{tasks}"


def growth_an_hour(points: list[tuple[float, float]]) -> float:
    """Returns the median slope between any two of the points, whose times are in seconds, over an hour."""
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.combinations(points, 2)]
    return 3_600 * statistics.median(slopes) if slopes else 0.0


def _thirds(points: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    ends = [len(points) * number // 3 for number in range(4)]
    return [points[begin:end] or [(0.0, 0.0)] for begin, end in itertools.pairwise(ends)]


def judge(
    rows: list[tuple[float, dict[str, Sample]]], before: dict[str, Sample], after: dict[str, Sample]
) -> list[str]:
    """Returns what has grown. `rows` are of the second load; before and after it all was idle."""
    grown = []
    for name in before.keys() & after.keys():
        points = [(at, found[name].resident_mib) for at, found in rows if name in found]
        hours = (points[-1][0] - points[0][0]) / 3_600 if points else 0.0
        growth, middle = growth_an_hour(points), statistics.median(mib for _, mib in points or [(0, 0)])
        most = max(_NOISE_MIB_AN_HOUR, _GROWTH_AN_HOUR * middle) / min(1.0, max(hours, 1e-3))
        print(f"  {name}: {growth:+.2f} MiB an hour at {middle:.1f} MiB, at most {most:.2f}")
        in_all = after[name].resident_mib - before[name].resident_mib
        thirds = [statistics.median(mib for _, mib in third) for third in _thirds(points)]
        grows = growth > most and thirds[2] - thirds[1] > most * hours / 3
        if in_all > _BROKER_MIB if name == _BROKER else grows:
            grown.append(f"the memory of {name} grows by {growth:.1f} MiB an hour, {in_all:.1f} in all")
        for kind in ("descriptors", "threads", "tasks"):
            old, new = getattr(before[name], kind), getattr(after[name], kind)
            is_exact = name != _BROKER or kind == "descriptors"  # Go makes threads as it likes
            if old is not None and new is not None and is_exact and new > old:
                grown.append(f"{name} has {new} {kind} when idle, and had {old}")
    return grown


async def measure(options: argparse.Namespace) -> None:
    minutes: float = options.minutes
    warm_up_s = min(_LONGEST_WARM_UP_S, 20 * minutes)
    load_s = 60 * minutes - warm_up_s
    sink = await asyncio.start_server(_take_traces, "127.0.0.1", 0)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(sink)
        fleet = await stack.enter_async_context(serving(sink.sockets[0].getsockname()[1], options.log))
        client = await stack.enter_async_context(await WireClient.connect(fleet.nats_url))
        load, watch = Load(fleet, client), Watch(fleet)
        await watch.sample("before any request")
        before = await _phase(watch, load, options, warm_up_s)
        num_before = len(watch.rows)
        after = await _phase(watch, load, options, load_s)
        (card,) = await system.cards(client)
    print(f"{minutes:g} minutes at {options.rate:g} requests a second: {sum(load.ends.values())} requests")
    for end, count in sorted(load.ends.items()):
        print(f"  {count:7} {end}")
    problems = load.wrong + judge(watch.rows[num_before:-1], before, after)
    if card.load is None or (card.load.running, card.load.waiting, card.load.used_blocks) != (0, 0, 0):
        problems.append(f"left over at the end: {card.load}")
    if problems:
        raise SystemExit("\n".join(problems))
    print("flat")


async def _phase(watch: Watch, load: Load, options: argparse.Namespace, seconds: float) -> dict[str, Sample]:
    """Puts load on the system, waits until it is idle, and returns what it then holds."""
    watching = asyncio.create_task(watch.every(options.interval_s, load.ends))
    await load.run(options.clients, options.rate, seconds)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await asyncio.sleep(_IDLE_S)
    samples = [await watch.sample("idle")]
    while len(samples) < _IDLE_SAMPLES:  # a task of an idle process may be due just then
        await asyncio.sleep(1.0)
        samples.append(await watch.sample("idle"))
    return {name: _least([one[name] for one in samples if name in one]) for name in samples[0]}


def _least(samples: list[Sample]) -> Sample:
    resident_mib, descriptors, threads, _ = map(min, zip(*[one._replace(tasks=0) for one in samples], strict=True))
    tasks = [one.tasks for one in samples if one.tasks is not None]
    return Sample(resident_mib, int(descriptors), int(threads), min(tasks, default=None))


async def _take_traces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A collector of traces that forgets them."""
    with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n")


def main() -> None:
    parser = flags.parser(__doc__, clients=24)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--interval-s", type=float, default=60.0)
    parser.add_argument("--log", type=Path, help="where the logs are kept")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
