"""Measures the first-token latency of eight concurrent requests that share a long prefix.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.shared_prefix [--model FILE.gguf] [--pairs 7] [--threads 2]
    [--server "--kv-unified -b 64 -ub 64"]

Compared with llama-server with eight slots, in interleaved pairs. Each round has its own prefix, so that neither side
has it cached from an earlier round."""

import asyncio
import functools
import random
import statistics
import time
from pathlib import Path

from bench import benchmark_model, flags, streams, system
from bench.baselines import llama_server
from bench.paired import interleave, show

_REQUESTS, _TAIL, _TOKENS = 8, 16, 2


async def first_token_s(complete: streams.Complete, prefix: int, number: int) -> float:
    """Returns the median time to first token."""
    rng = random.Random(number)
    common = benchmark_model.random_prompt(rng, prefix)
    prompts = [common + benchmark_model.random_prompt(rng, _TAIL) for _ in range(_REQUESTS)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(complete(prompt, _TOKENS) for prompt in prompts))
    return statistics.median(times[0] - began for times in answers)


async def measure(model: Path, prefix: int, pairs: int, threads: int, server_flags: list[str]) -> None:
    context = str(_REQUESTS * (prefix + _TAIL + 16))
    ours = ("--threads", str(threads), "--kv-tokens", context, "--context-length", str(prefix + _TAIL + 16))
    async with (
        system.running(model, *ours) as client,
        llama_server.running(model, threads, "-np", str(_REQUESTS), "-c", context, *server_flags) as server,
    ):
        seen = await interleave(
            functools.partial(first_token_s, server.complete, prefix),
            functools.partial(first_token_s, functools.partial(streams.complete, client), prefix),
            pairs,
            warm_up=0,
        )
    print(f"{model.name}, {_REQUESTS} requests with one {prefix}-token prefix, {threads} threads, {pairs} pairs")
    show(("llama-server", "tokenbus"), "s to the first token, in the median", seen, decimals=2)


def main() -> None:
    parser = flags.server_parser(__doc__, prefix=1_000, pairs=7, threads=2)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.prefix, options.pairs, options.threads, options.server))


if __name__ == "__main__":
    main()
