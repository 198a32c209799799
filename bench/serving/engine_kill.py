"""Measures how long streams pause when their engine is killed, with and without copies that outlive it.

Run: .venv/bin/python -m bench.serving.engine_kill [--model FILE.gguf] [--streams 8] [--prompt 1000] [--pairs 1]

Once every stream has a token, the engine gets SIGKILL. The next one continues all streams; the pause of a stream is the
longest time between two of its tokens from then on."""

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

from bench import benchmark_model, flags, streams, system
from bench.paired import interleave, show

_AFTER = 24
"""The tokens that an answer still lacks when the first stream begins to wait for the last one."""
_serials = itertools.count()


class _Stream:
    """One stream, and when its tokens arrived."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.has_token = asyncio.Event()

    def on_token(self) -> None:
        self.times.append(time.perf_counter())
        self.has_token.set()


async def longest_pause_s(model: Path, count: int, prompt_tokens: int, worker_flags: tuple[str, ...]) -> float:
    async with system.running(model, *worker_flags) as client:
        engine = await system.engine_pid(client)
        running = [_Stream() for _ in range(count)]
        # Every stream must outlast the prompts of all others.
        tasks = []
        for one in running:
            prompt = benchmark_model.prompt(next(_serials), prompt_tokens)
            tokens = _AFTER + 16 * (count + prompt_tokens // 16)
            tasks.append(asyncio.create_task(streams.complete(client, prompt, tokens, one.on_token)))
        for one in running:
            await one.has_token.wait()
        killed_at = time.perf_counter()
        before = [len(one.times) for one in running]
        os.kill(engine, signal.SIGKILL)
        for one, had in zip(running, before, strict=True):
            while len(one.times) < had + 3:
                one.has_token.clear()
                await one.has_token.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return max(streams.longest_pause_s(one.times, killed_at) for one in running)


async def measure(model: Path, count: int, prompt_tokens: int, pairs: int, worker_flags: list[str]) -> None:
    common = ("--context-length", "4096", "--kv-tokens", "16384", "--threads", "2", *worker_flags)
    seen = await interleave(
        lambda _: longest_pause_s(model, count, prompt_tokens, (*common, "--host-cache-mib", "0")),
        lambda _: longest_pause_s(model, count, prompt_tokens, common),
        pairs,
        warm_up=0,
    )
    print(f"{model.name}, {count} streams of {prompt_tokens} tokens, longest pause, median of {pairs} pairs")
    show(("without copies", "with copies"), "s", seen, decimals=2)


def main() -> None:
    parser = flags.model_parser(__doc__, streams=8, prompt=1_000, pairs=1)
    options, worker_flags = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.prompt, options.pairs, worker_flags))


if __name__ == "__main__":
    main()
