"""Measures how long running streams stall while a long prompt is prefilled, and that prompt's own first token.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.long_prompt [--model FILE.gguf] [--pairs 7] [--threads 2]

Four streams run, and when each has some tokens a prompt of 1,200 tokens arrives. Compared with llama-server, in
interleaved pairs."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from bench import flags, streams, system
from bench.baselines import llama_server
from bench.models import benchmark_model
from bench.paired import quartiles

Complete = Callable[[list[int], int], Coroutine[Any, Any, list[float]]]
_STREAMS, _BEFORE_S = 4, 2.0


class Seen(NamedTuple):
    gap_s: float
    """The longest time that any stream was without a token."""
    first_s: float
    """Time from the long prompt's request to its first token."""


async def one(complete: Complete, number: int, length: int, tokens: int) -> Seen:
    rng = random.Random(number)
    tasks = [asyncio.create_task(complete(_prompt(rng, 16), tokens)) for _ in range(_STREAMS)]
    await asyncio.sleep(_BEFORE_S)
    began = time.perf_counter()
    first = (await complete(_prompt(rng, length), 1))[0]
    gaps = [
        max(later - before for before, later in itertools.pairwise(times)) for times in await asyncio.gather(*tasks)
    ]
    return Seen(max(gaps), first - began)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, benchmark_model.VOCABULARY) for _ in range(length)]


async def measure(model: Path, length: int, tokens: int, pairs: int, threads: int, flags: list[str]) -> None:
    ours = ("--threads", str(threads), "--kv-tokens", "8192", "--context-length", "2048", *flags)
    seen: list[tuple[Seen, Seen]] = []
    async with (
        system.running(model, *ours) as client,
        llama_server.running(model, threads, "-np", "8", "-c", str(8 * 2_048)) as server,
    ):
        for number in range(pairs):
            theirs = await one(server.complete, number, length, tokens)
            mine = await one(lambda ids, count: streams.complete(client, ids, count), number, length, tokens)
            seen.append((theirs, mine))
            print(f"  round {number + 1}: llama-server {theirs}, tokenbus {mine}", flush=True)
    print(f"{model.name}, {_STREAMS} streams and a {length}-token prompt, {threads} threads, {pairs} pairs")
    for name, column in (("longest gap", 0), ("the prompt's first token", 1)):
        theirs_s, ours_s = (statistics.median(pair[side][column] for pair in seen) for side in (0, 1))
        ratio = quartiles([mine[column] / theirs[column] for theirs, mine in seen])
        print(f"  {name:<25} llama-server {theirs_s:6.2f} s, tokenbus {ours_s:6.2f} s; ratio {ratio}")


def main() -> None:
    parser = flags.model_parser(__doc__, length=1_200, tokens=160, pairs=7, threads=2)
    options, worker_flags = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.length, options.tokens, options.pairs, options.threads, worker_flags))


if __name__ == "__main__":
    main()
