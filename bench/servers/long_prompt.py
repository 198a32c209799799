"""Measures how long running streams stall while a long prompt is prefilled, and that prompt's own first token.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.long_prompt [--model FILE.gguf] [--pairs 7] [--threads 2]
    [--server "--kv-unified -b 64 -ub 64"]

Four streams run, and when each has some tokens a prompt of 1,200 tokens arrives. Compared with llama-server, in
interleaved pairs."""

import argparse
import asyncio
import functools
import itertools
import random
import time
from pathlib import Path
from typing import NamedTuple

from bench import benchmark_model, flags, streams, system
from bench.baselines import llama_server
from bench.paired import interleave, show

_STREAMS, _BEFORE_S = 4, 2.0


class Seen(NamedTuple):
    gap_s: float
    """The longest time that any stream was without a token."""
    first_s: float
    """Time from the long prompt's request to its first token."""


async def one(complete: streams.Complete, length: int, tokens: int, number: int) -> Seen:
    rng = random.Random(number)
    prompts = [benchmark_model.random_prompt(rng, 16) for _ in range(_STREAMS)]
    tasks = [asyncio.create_task(complete(prompt, tokens)) for prompt in prompts]
    await asyncio.sleep(_BEFORE_S)
    began = time.perf_counter()
    first = (await complete(benchmark_model.random_prompt(rng, length), 1))[0]
    gaps = [
        max(later - before for before, later in itertools.pairwise(times)) for times in await asyncio.gather(*tasks)
    ]
    return Seen(max(gaps), first - began)


async def measure(model: Path, options: argparse.Namespace, worker_flags: list[str]) -> None:
    length, tokens, threads = options.length, options.tokens, options.threads
    ours = ("--threads", str(threads), "--kv-tokens", "8192", "--context-length", "2048", *worker_flags)
    async with (
        system.running(model, *ours) as client,
        llama_server.running(model, threads, "-np", "8", "-c", str(8 * 2_048), *options.server) as server,
    ):
        seen = await interleave(
            functools.partial(one, server.complete, length, tokens),
            functools.partial(one, functools.partial(streams.complete, client), length, tokens),
            options.pairs,
            warm_up=0,
        )
    print(f"{model.name}, {_STREAMS} streams and a {length}-token prompt, {threads} threads, {options.pairs} pairs")
    for name, column in (("longest gap", 0), ("the prompt's first token", 1)):
        print(f" {name}")
        show(("llama-server", "tokenbus"), "s", [(theirs[column], mine[column]) for theirs, mine in seen], 2)


def main() -> None:
    parser = flags.server_parser(__doc__, length=1_200, tokens=160, pairs=7, threads=2)
    options, worker_flags = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options, worker_flags))


if __name__ == "__main__":
    main()
