"""Compares the engine of another checkout of Tokenbus with this one's, request by request (A B A B).

Run: .venv/bin/python -m bench.serving.versions ../other [--pairs 15] [--streams 1] [--tokens 48] [--prompt 1024]
     [--threads 1] [--model FILE.gguf] [--other-model FILE.gguf]

Each checkout has a broker, a router and a worker of its own, which serve the same file all the time, or with
--other-model two files, perhaps from one checkout (`.`); the client is this checkout's. The other checkout needs its
own environment (`make .venv/.ready` there). Two costs are compared: generating tokens while all streams decode, and
computing a prompt that no worker has cached. Above 1, this checkout is worse. The CPU time is that of the engine alone,
which other programs on the machine affect less than wall time. Without --model, a 0.5B model in Q8_0 with random
weights is made."""

import argparse
import asyncio
import functools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import benchmark_model, flags, streams, system
from bench.paired import interleave, quartiles
from tokenbus.client.wire.wire_client import WireClient


class Cost(NamedTuple):
    cpu_s: float
    wall_s: float


class Costs(NamedTuple):
    decode: Cost
    """The cost of a token."""
    prompt: Cost


async def costs(client: WireClient, engine_pid: int, options: argparse.Namespace, number: int) -> Costs:
    complete, rng = functools.partial(streams.complete, client), random.Random(number)
    prompts = [benchmark_model.random_prompt(rng, 16) for _ in range(options.streams)]
    took = await streams.decode(complete, prompts, options.tokens, engine_pid)
    cpu, wall = system.cpu_seconds(engine_pid), time.perf_counter()
    await complete(benchmark_model.prompt(number, options.prompt), 1)
    prompt = Cost(system.cpu_seconds(engine_pid) - cpu, time.perf_counter() - wall)
    return Costs(Cost(took.cpu_s / took.decoded, took.decode_s / took.decoded), prompt)


async def compare(other: Path, options: argparse.Namespace, model: Path) -> None:
    sizes = ("--context-length", "4096", "--kv-tokens", "8192", "--host-cache-mib", "0")
    settings = ("--threads", str(options.threads), *sizes)
    async with (
        system.started(options.other_model or model, settings, python=other / ".venv/bin/python") as theirs,
        system.started(model, settings, python=Path(sys.executable)) as ours,
    ):
        pids = [await system.engine_pid(one.client) for one in (theirs, ours)]
        seen = await interleave(
            lambda number: costs(theirs.client, pids[0], options, number),
            lambda number: costs(ours.client, pids[1], options, number),
            options.pairs,
        )
    against = f" / {options.other_model.name}" if options.other_model else ""
    print(f"{model.name}{against}, {options.threads} threads, {options.pairs} interleaved pairs; cost, this / other")
    _show(f"decode, {options.streams} streams of {options.tokens} tokens", [(a.decode, b.decode) for a, b in seen])
    _show(f"a prompt of {options.prompt} tokens", [(a.prompt, b.prompt) for a, b in seen])


def _show(name: str, seen: Sequence[tuple[Cost, Cost]]) -> None:
    print(f"  {name}")
    print(f"    engine's CPU time   {quartiles([b.cpu_s / a.cpu_s for a, b in seen])}")
    print(f"    wall time           {quartiles([b.wall_s / a.wall_s for a, b in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, pairs=15, streams=1, tokens=48, prompt=1_024, threads=1)
    parser.add_argument("other", type=Path)
    parser.add_argument("--other-model", type=Path, help="the other checkout's file, if it is not the same")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(compare(options.other.resolve(), options, model))


if __name__ == "__main__":
    main()
