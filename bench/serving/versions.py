"""Compares the engine of another checkout of Tokenbus with this one's, request by request (A B A B).

Run: .venv/bin/python -m bench.serving.versions ../other [--pairs 15] [--streams 1] [--tokens 48] [--prompt 1024]
     [--threads 1] [--model FILE.gguf]

Each checkout has a broker, a router and a worker of its own, which serve the same file all the time; the client is this
checkout's. The other checkout needs its own environment (`make .venv/.ready` there). Two costs are compared: generating
tokens from the first to the last, and computing a prompt that no worker has cached. Above 1, this checkout is worse.
The CPU time is that of the engine alone, which other programs on the machine affect less than wall time. Without
--model, a 0.5B model in Q8_0 with random weights is made."""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from bench import flags, streams, system
from bench.models import benchmark_model
from bench.paired import quartiles
from bench.serving.decode import Timing, through_the_system
from tokenbus.client import Client


async def compute_prompt(client: Client, engine_pid: int, prompt: list[int]) -> Timing:
    """Returns what a prompt costs until its first token arrives."""
    cpu, wall = system.cpu_seconds(engine_pid), time.perf_counter()
    await streams.complete(client, prompt, 1)
    return Timing(time.perf_counter() - wall, system.cpu_seconds(engine_pid) - cpu)


async def compare(other: Path, options: argparse.Namespace, model: Path) -> None:
    sizes = ("--context-length", "4096", "--kv-tokens", "8192", "--host-cache-mib", "0")
    settings = ("--threads", str(options.threads), *sizes)
    async with (
        system.started(model, settings, python=other / ".venv/bin/python") as theirs,
        system.started(model, settings, python=Path(sys.executable)) as ours,
    ):
        sides = [(one.client, (await system.card(one.client)).pids.engine) for one in (theirs, ours)]
        decoded, prompts = [], []
        for number in range(options.pairs + 1):
            prompt = benchmark_model.prompt(number, options.prompt)
            decoded.append([await through_the_system(*side, options.streams, options.tokens) for side in sides])
            prompts.append([await compute_prompt(*side, prompt) for side in sides])
    print(f"{model.name}, {options.threads} threads, {options.pairs} interleaved pairs; cost, this / other")
    for name, seen in (
        (f"decode, {options.streams} streams of {options.tokens} tokens", decoded[1:]),
        (f"a prompt of {options.prompt} tokens", prompts[1:]),
    ):
        print(f"  {name}")
        print(f"    engine's CPU time   {quartiles([b.cpu_s / a.cpu_s for a, b in seen])}")
        print(f"    wall time           {quartiles([b.wall_s / a.wall_s for a, b in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, pairs=15, streams=1, tokens=48, prompt=1_024, threads=1)
    parser.add_argument("other", type=Path)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(compare(options.other.resolve(), options, model))


if __name__ == "__main__":
    main()
