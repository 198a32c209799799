"""Compares ways in which an engine's threads wait for each other, while so many other processes are busy.

    python -m bench.serving.waiting --model PATH [--threads 2] [--busy 0] [--streams 1] [--tokens 48] [--rounds 9]

Three systems run, of which one at a time is asked: a worker decides for itself (worker/engine/gguf/waiting.py), one's
threads always sleep, and one's spin for 3 ms, as they do without any setting of OpenMP. Prints the tokens a second of
each and their ratio to the best. Each busy process runs an endless loop at the usual priority."""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import benchmark_model, streams, system
from bench.paired import quartiles
from tokenbus.client.wire.wire_client import WireClient

WAYS: dict[str, dict[str, str]] = {
    "decides": {},
    "sleeps": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
    "spins": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"},
}
_PROMPT = 16


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables meanwhile."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def _speed(client: WireClient, options: argparse.Namespace, rng: random.Random) -> float:
    """Returns the tokens a second of all streams, from the first token of the last to the last of the first."""
    prompts = [[rng.randrange(100, 900) for _ in range(_PROMPT)] for _ in range(options.streams)]
    times = await asyncio.gather(*(streams.complete(client, prompt, options.tokens) for prompt in prompts))
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(begin < time <= end for one in times for time in one) / (end - begin)


async def measure(options: argparse.Namespace, model: Path) -> None:
    rng = random.Random(options.seed)
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    flags = ("--threads", str(options.threads), "--max-num-seqs", "8", "--context-length", "1024")
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for way, values in WAYS.items():
            with _variables(values):
                clients[way] = await stack.enter_async_context(system.running(model, *flags))
        with _busy(options.busy):
            for number in range(options.rounds + 1):
                for way in [*WAYS][:: 1 if number % 2 else -1]:
                    speed = await _speed(clients[way], options, rng)
                    if number:
                        speeds[way].append(speed)
    show(speeds, options)


def show(speeds: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(f"{options.threads} threads, {options.streams} streams, {options.busy} busy processes")
    best = max(speeds, key=lambda way: statistics.median(speeds[way]))
    for way, seen in speeds.items():
        ratios = quartiles([one / other for one, other in zip(seen, speeds[best], strict=True)])
        print(f"  {way:<8} {statistics.median(seen):8.1f} tokens/s, {ratios} of {best!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(options, model))


if __name__ == "__main__":
    main()
