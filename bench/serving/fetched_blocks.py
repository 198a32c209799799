"""Measures how much sooner the first token arrives if a prompt's KV blocks are fetched from another worker.

Run: .venv/bin/python -m bench.serving.fetched_blocks [--model FILE.gguf] [--tokens 512] [--pairs 7] [--threads 2]

Two workers over NATS on this machine. In each pair one computes a prompt of its own, and the other fetches it. With
`--gaps`, four streams run at the second worker beside requests that follow each other, and the gaps between their
tokens are compared: with prompts that are fetched, and with prompts that are already cached."""

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats

from bench import benchmark_model, flags, system
from bench.paired import quartiles
from tests.support.run_sender import RunSender, Streamed
from tokenbus.protocol.wire import codec, internal, messages

_STREAMS = 4
_FIRST = 8
"""Tokens of each stream that don't count, because other streams' prompts are being computed."""


@asynccontextmanager
async def _workers(model: Path, threads: int) -> AsyncIterator[RunSender]:
    common = ("--threads", str(threads), "--kv-tokens", "8192", "--context-length", "4096")
    workers = [(*common, "--worker-id", name) for name in ("a", "b")]
    async with system.started(model, *workers) as one, await nats.connect(one.nats_url) as connection:
        sender = RunSender(connection, "m")
        await sender.open("a", "b")
        yield sender


def _prompt(number: int, tokens: int) -> list[int]:
    return benchmark_model.random_prompt(random.Random(number), tokens + 1)


def _timings(streamed: Streamed) -> messages.Timings:
    timings = streamed.terminals[0].timings
    assert isinstance(timings, messages.Timings)
    return timings


async def measure(model: Path, tokens: int, pairs: int, threads: int) -> None:
    async with _workers(model, threads) as sender:
        ratios, rates = [], []
        for number in range(pairs):
            prompt = _prompt(number, tokens)
            computed = _timings(await sender.ask("a", prompt, max_tokens=2))
            fetched = _timings(await sender.ask("b", prompt, max_tokens=2, fetch_from=sender.source("a")))
            told = await sender.until_fetched(number + 1)
            ratios.append(computed.ttft_ms / fetched.ttft_ms)
            rates.append(told.fetched_bytes / told.fetch_ms / 1e3 if told.fetch_ms else 0.0)
            print(
                f"  pair {number + 1}: computed {computed.ttft_ms:.0f} ms, fetched {fetched.fetched_tokens} tokens in "
                f"{fetched.fetch_ms:.0f} ms, first token after {fetched.ttft_ms:.0f} ms",
                flush=True,
            )
    print(f"{tokens} tokens, {threads} threads, {pairs} pairs: time to first token, computed / fetched")
    print(f"  {quartiles(ratios)}; {statistics.median(rates):.0f} MB/s")


async def measure_gaps(model: Path, tokens: int, pairs: int, threads: int) -> None:
    """Streams of one worker, beside requests that follow each other, whose blocks are fetched or already there."""
    async with _workers(model, threads) as sender:
        prompt = _prompt(1_000, tokens)
        await sender.ask("a", prompt, max_tokens=1)
        ratios = []
        for number in range(pairs):
            gaps = []
            for moves in (False, True) if number % 2 else (True, False):
                await sender.ask("b", prompt, max_tokens=1)  # cached, until the first fetch
                streams = [await sender.run("b", _prompt(place, 31), max_tokens=64) for place in range(_STREAMS)]
                for stream in streams:
                    await stream.until_tokens(_FIRST)
                beside = asyncio.create_task(_move(sender, prompt) if moves else _reuse(sender, prompt))
                for stream in streams:
                    await stream.terminal()
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)
                gaps.append((moves, _p99(streams)))
            found = dict(gaps)
            ratios.append(found[True] / found[False])
            cached_ms, fetched_ms = 1e3 * found[False], 1e3 * found[True]
            print(
                f"  pair {number + 1}: {cached_ms:.0f} ms beside cached, {fetched_ms:.0f} ms beside fetched", flush=True
            )
        moved = sum(one.fetched_bytes for one in sender.fetches)
        seconds = sum(one.fetch_ms for one in sender.fetches) / 1e3
    print(f"p99 gap of {_STREAMS} streams beside prompts that are fetched / cached: {quartiles(ratios)}")
    print(f"  {moved / seconds / 1e6:.0f} MB/s")


async def _reuse(sender: RunSender, prompt: list[int]) -> None:
    while True:
        await sender.ask("b", prompt, max_tokens=1)


async def _move(sender: RunSender, prompt: list[int]) -> None:
    control = f"tokenbus.v1.worker.{sender.model}.b.control"
    while True:
        await sender.ask("b", prompt, max_tokens=1, fetch_from=sender.source("a"))
        num_removed = sender.num_removed
        await sender.nats.request(control, codec.encode(internal.Control(op="clear_cache")), timeout=5)
        await sender.until_removed(num_removed)


def _p99(streams: list[Streamed]) -> float:
    gaps = [after - before for one in streams for before, after in itertools.pairwise(one.arrived_at[_FIRST:])]
    return statistics.quantiles(gaps, n=100)[98]


def main() -> None:
    parser = flags.model_parser(__doc__, tokens=512, pairs=7, threads=2)
    parser.add_argument("--gaps", action="store_true")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        run = measure_gaps if options.gaps else measure
        asyncio.run(run(model, options.tokens, options.pairs, options.threads))


if __name__ == "__main__":
    main()
