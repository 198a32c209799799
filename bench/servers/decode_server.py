"""Compares the decoding speed of the whole system with llama.cpp's own programs.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.decode_server [--streams 8] [--against llama-server]

It compares with `llama-bench` (one stream) or `llama-batched-bench` (several), which only decode, or with
`llama-server` with as many slots, in interleaved pairs: tokens per second once every stream has its first token."""

import asyncio
import contextlib
import functools
import json
import statistics
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench import flags, streams, system
from bench.baselines import llama_server
from bench.models import benchmark_model
from bench.paired import quartiles

_PROMPT = list(range(10, 26))
_CONTEXT = 8_192
Complete = Callable[[list[int], int], Coroutine[Any, Any, list[float]]]


async def of_streams(complete: Complete, count: int, tokens: int) -> float:
    """Returns tokens per second of concurrent streams. Their prompts differ in the first token."""
    prompts = [[30 + number, *_PROMPT[1:]] for number in range(count)]
    times = await asyncio.gather(*(complete(prompt, tokens) for prompt in prompts))
    begun, ended = max(one[0] for one in times), max(one[-1] for one in times)
    return sum(at > begun for one in times for at in one) / (ended - begun)


async def of_llama_bench(model: Path, count: int, tokens: int, threads: int) -> float:
    """Returns the tokens per second that llama-bench or llama-batched-bench reports."""
    common = ["-m", str(model), "-t", str(threads)]
    if count == 1:
        command = [
            str(llama_server.binary("llama-bench")),
            *common,
            "-p",
            "0",
            "-n",
            str(tokens),
            "-r",
            "1",
            "-o",
            "json",
        ]
        return float(json.loads(await _output(command))[0]["avg_ts"])
    sizes = ["-c", str(_CONTEXT), "-npp", str(len(_PROMPT)), "-ntg", str(tokens), "-npl", str(count)]
    command = [str(llama_server.binary("llama-batched-bench")), *common, *sizes, "--output-format", "jsonl"]
    lines = [json.loads(line) for line in (await _output(command)).splitlines() if line.startswith("{")]
    return float(lines[-1]["speed_tg"])


async def _output(command: list[str]) -> str:
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    return done.stdout


async def measure(model: Path, against: str, count: int, tokens: int, pairs: int, threads: int) -> None:
    ours = ("--threads", str(threads), "--kv-tokens", str(_CONTEXT), "--context-length", "1024", "--max-num-seqs", "16")
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(system.running(model, *ours))
        other = functools.partial(of_llama_bench, model, count, tokens, threads)
        if against == "llama-server":
            flags = ("-np", str(count), "-c", str(_CONTEXT))
            server = await stack.enter_async_context(llama_server.running(model, threads, *flags))
            other = functools.partial(of_streams, server.complete, count, tokens)
        own = functools.partial(of_streams, functools.partial(streams.complete, client), count, tokens)
        await other()
        await own()
        seen = [(await other(), await own()) for _ in range(pairs)]
    print(f"{model.name}, {count} streams of {tokens} tokens, {threads} threads, {pairs} interleaved pairs")
    print(f"  {against:<20} {statistics.median(theirs for theirs, _ in seen):8.1f} tokens/s")
    print(f"  {'tokenbus':<20} {statistics.median(mine for _, mine in seen):8.1f} tokens/s")
    print(f"  speed, tokenbus / {against}   {quartiles([mine / theirs for theirs, mine in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=8, tokens=64, pairs=9, threads=1)
    parser.add_argument("--against", choices=["llama-bench", "llama-server"], default="llama-server")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.against, options.streams, options.tokens, options.pairs, options.threads))


if __name__ == "__main__":
    main()
