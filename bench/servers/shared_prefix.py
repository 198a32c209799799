"""Measures the first-token latency of eight concurrent requests that share a long prefix.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.shared_prefix [--model FILE.gguf] [--pairs 7] [--threads 2]

Compared with llama-server with eight slots, in interleaved pairs. Each round has its own prefix, so that neither side
has it cached from an earlier round."""

import asyncio
import random
import statistics
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from bench import flags, streams, system
from bench.baselines import llama_server
from bench.models import benchmark_model
from bench.paired import quartiles

_REQUESTS, _TAIL, _TOKENS = 8, 16, 2


async def measure(model: Path, prefix: int, pairs: int, threads: int) -> None:
    context = str(_REQUESTS * (prefix + _TAIL + 16))
    ours = ("--threads", str(threads), "--kv-tokens", context, "--context-length", str(prefix + _TAIL + 16))
    seen = []
    async with (
        system.running(model, *ours) as client,
        llama_server.running(model, threads, "-np", str(_REQUESTS), "-c", context) as server,
    ):
        for number in range(pairs):
            prompts = _prompts(number, prefix)
            theirs = await _first_tokens([server.complete(prompt, _TOKENS) for prompt in prompts])
            seen.append((theirs, await _first_tokens([streams.complete(client, one, _TOKENS) for one in prompts])))
            print(f"  round {number + 1}: llama-server {theirs:.2f} s, tokenbus {seen[-1][1]:.2f} s", flush=True)
    print(f"{model.name}, {_REQUESTS} requests with one {prefix}-token prefix, {threads} threads, {pairs} pairs")
    print(
        f"  llama-server   {statistics.median(theirs for theirs, _ in seen):6.2f} s to the first token, in the median"
    )
    print(f"  tokenbus       {statistics.median(ours_s for _, ours_s in seen):6.2f} s")
    print(f"  tokenbus / llama-server   {quartiles([ours_s / theirs for theirs, ours_s in seen])}")


def _prompts(number: int, prefix: int) -> list[list[int]]:
    rng = random.Random(number)
    common = [rng.randrange(10, benchmark_model.VOCABULARY) for _ in range(prefix)]
    return [common + [rng.randrange(10, benchmark_model.VOCABULARY) for _ in range(_TAIL)] for _ in range(_REQUESTS)]


async def _first_tokens(answers: list[Coroutine[Any, Any, list[float]]]) -> float:
    """Returns the median time to first token."""
    began = time.perf_counter()
    return statistics.median(times[0] - began for times in await asyncio.gather(*answers))


def main() -> None:
    parser = flags.model_parser(__doc__, prefix=1_000, pairs=7, threads=2)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.prefix, options.pairs, options.threads))


if __name__ == "__main__":
    main()
