"""Compares the decoding speed of the whole system with llama.cpp's own programs.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.decode_server [--streams 8] [--against llama-server]

It compares with `llama-bench` (one stream) or `llama-batched-bench` (several), which only decode, or with
`llama-server` with as many slots, in interleaved pairs: tokens per second while all streams decode."""

import argparse
import asyncio
import contextlib
import functools
import json
import subprocess
from pathlib import Path

from bench import benchmark_model, flags, streams, system
from bench.baselines import llama_server
from bench.paired import interleave, show

_PROMPT = list(range(10, 26))
_CONTEXT = 8_192


async def of_streams(complete: streams.Complete, count: int, tokens: int, pid: int) -> float:
    """Returns tokens per second of concurrent streams. Their prompts differ in the first token."""
    prompts = [[30 + number, *_PROMPT[1:]] for number in range(count)]
    took = await streams.decode(complete, prompts, tokens, pid)
    return took.decoded / took.decode_s


async def of_llama_bench(model: Path, count: int, tokens: int, threads: int) -> float:
    """Returns the tokens per second that llama-bench or llama-batched-bench reports."""
    common = ["-m", str(model), "-t", str(threads)]
    if count == 1:
        sizes = ["-p", "0", "-n", str(tokens), "-r", "1"]
        return float(json.loads(await _output("llama-bench", *common, *sizes, "-o", "json"))[0]["avg_ts"])
    sizes = ["-c", str(_CONTEXT), "-npp", str(len(_PROMPT)), "-ntg", str(tokens), "-npl", str(count)]
    said = await _output("llama-batched-bench", *common, *sizes, "--output-format", "jsonl")
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return float(lines[-1]["speed_tg"])


async def _output(name: str, *flags: str) -> str:
    command = [str(llama_server.binary(name)), *flags]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    return done.stdout


async def measure(model: Path, options: argparse.Namespace) -> None:
    count, tokens, threads, against = options.streams, options.tokens, options.threads, options.against
    ours = ("--threads", str(threads), "--kv-tokens", str(_CONTEXT), "--context-length", "1024", "--max-num-seqs", "16")
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(system.running(model, *ours))
        pid = await system.engine_pid(client)
        other = functools.partial(of_llama_bench, model, count, tokens, threads)
        if against == "llama-server":
            slots = ("-np", str(count), "-c", str(_CONTEXT), *options.server)
            server = await stack.enter_async_context(llama_server.running(model, threads, *slots))
            other = functools.partial(of_streams, server.complete, count, tokens, pid)
        own = functools.partial(of_streams, functools.partial(streams.complete, client), count, tokens, pid)
        seen = await interleave(lambda _: other(), lambda _: own(), options.pairs)
    print(f"{model.name}, {count} streams of {tokens} tokens, {threads} threads, {options.pairs} interleaved pairs")
    show((against, "tokenbus"), "tokens/s", seen)


def main() -> None:
    parser = flags.server_parser(__doc__, streams=8, tokens=64, pairs=9, threads=1)
    parser.add_argument("--against", choices=["llama-bench", "llama-server"], default="llama-server")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options))


if __name__ == "__main__":
    main()
