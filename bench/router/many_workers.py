"""Measures how many requests per second 500 workers on one broker can serve on this machine, and what fails first.

Run: .venv/bin/python -m bench.router.many_workers [--workers 500] [--rates 50 100 200 300] [--seconds 60]

Simulated workers with steps of 50 ms, 100 in each process, one router, one broker and the clients share this machine's
cores. Each request has 512 token ids, 256 of which it shares with nine others, and generates 16 tokens. A rate is
sustained if every request gets its 16 tokens and the time to first token does not grow. CPU time is listed by kind of
process."""

import argparse
import asyncio
import contextlib
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from bench.system import cpu_seconds, start
from tokenbus.cli.console import nats_server
from tokenbus.client import Client
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

_PROMPT, _SHARED, _SHARERS, _OUTPUT = 512, 256, 10, 16
_PER_PROCESS = 100
_WORKER = (
    *("worker", "--engine", "sim", "--model", "steps-of-50ms", "--served-name", "m"),
    *("--kv-tokens", "16384", "--context-length", "2048", "--max-num-seqs", "8"),
)


class Result(NamedTuple):
    rate: float
    ends: Counter[str]
    first_ms: list[float]
    view: messages.RouterStats | None
    cpu: dict[str, float]
    took_s: float


class Testbed:
    """The processes of the system, by kind."""

    def __init__(self, nats: nats_server.NatsServer, folder: Path) -> None:
        self.nats = nats
        self.folder = folder
        self.pids: dict[str, list[int]] = {"broker": [nats.pid]}
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, kind: str, *arguments: str) -> None:
        log = self.folder / f"{kind}-{len(self.processes)}.log"
        process = start(log, *arguments, "--nats", self.nats.url)
        self.processes.append(process)
        self.pids.setdefault(kind, []).append(process.pid)

    def cpu(self) -> dict[str, float]:
        """Returns the CPU seconds spent so far, by kind of process. Engines are the children of frontends."""
        engines = [int(pid) for frontend in self.pids["front"] for pid in _children(frontend)]
        kinds = self.pids | {"engine": engines}
        return {kind: sum(map(cpu_seconds, pids)) for kind, pids in kinds.items()} | {"clients": time.process_time()}


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Returns prompts of which every ten share a prefix."""
    made: list[list[int]] = []
    while len(made) < count:
        shared = [rng.randrange(1, VOCAB_SIZE) for _ in range(_SHARED)]
        made += [shared + [rng.randrange(1, VOCAB_SIZE) for _ in range(_PROMPT - _SHARED)] for _ in range(_SHARERS)]
    rng.shuffle(made)
    return made


async def ask(client: Client, prompt: list[int], ends: Counter[str], first_ms: list[float]) -> None:
    began = time.monotonic()
    waits = True
    async for chunk in client.generate("m", token_ids=prompt, max_tokens=_OUTPUT, ignore_eos=True):
        if waits and chunk.tokens:
            waits = False
            first_ms.append((time.monotonic() - began) * 1e3)
    ends[str(chunk.error.code if chunk.error else chunk.finish_reason)] += 1


async def load(client: Client, bed: Testbed, rate: float, seconds: float) -> Result:
    """Sends requests at a steady rate, regardless of their outcome."""
    asked = prompts(int(rate * seconds), random.Random(rate))
    ends, first_ms = Counter[str](), list[float]()
    before, began = bed.cpu(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, prompt in enumerate(asked):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(ask(client, prompt, ends, first_ms))
    took_s = time.monotonic() - began
    cpu = {kind: spent - before[kind] for kind, spent in bed.cpu().items()}
    view: messages.RouterStats | None = None
    with contextlib.suppress(errors.RequestError):
        view = (await client.models()).router or None
    return Result(rate, ends, first_ms, view, cpu, took_s)


async def until_ready(client: Client, count: int) -> None:
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(errors.RequestError):
                served = (await client.models(timeout_s=5.0)).models
                cards = [card for one in served for card in one.workers or []]
                if sum(card.state is messages.WorkerState.READY for card in cards) >= count:
                    return
            await asyncio.sleep(0.5)


def show(result: Result) -> None:
    half = len(result.first_ms) // 2
    halves = [statistics.median(part or [0.0]) for part in (result.first_ms[:half], result.first_ms[half:])]
    placed = result.view
    print(f"{result.rate:>6.0f} /s: {dict(result.ends)} in {result.took_s:.1f} s")
    if result.first_ms:
        print(f"         first token p50 {halves[0]:.0f} ms in the first half, {halves[1]:.0f} in the second")
    if placed:
        print(f"         decision p50 {placed.decision_p50_us:.0f} µs, p99 {placed.decision_p99_us:.0f}")
    used = {kind: f"{spent / result.took_s:.2f}" for kind, spent in result.cpu.items()}
    print(f"         cores used: {', '.join(f'{kind} {cores}' for kind, cores in used.items())}", flush=True)


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        nats = await nats_server.start(0, Path(folder) / "nats.log")
        bed = Testbed(nats, Path(folder))
        bed.add("router", "router")
        for first in range(0, options.workers, _PER_PROCESS):
            replicas = min(_PER_PROCESS, options.workers - first)
            bed.add("front", *_WORKER, "--worker-id", f"p{first}", "--replicas", str(replicas))
        try:
            async with await Client.connect(nats.url, encoding=codec.Encoding.MSGPACK) as client:
                began = time.monotonic()
                await until_ready(client, options.workers)
                print(f"{options.workers} workers ready after {time.monotonic() - began:.1f} s")
                before, began = bed.cpu(), time.monotonic()
                await asyncio.sleep(10.0)
                idle = {kind: spent - before[kind] for kind, spent in bed.cpu().items()}
                show(Result(0, Counter(), [], None, idle, time.monotonic() - began))
                for rate in options.rates:
                    show(await load(client, bed, rate, options.seconds))
                    await asyncio.sleep(2.0)
        finally:
            for process in bed.processes:
                process.kill()
                process.wait(timeout=30)
            nats.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0, 200.0, 300.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
