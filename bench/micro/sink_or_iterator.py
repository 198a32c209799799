"""Compares handing each token of 64 streams to a plain function with an async iterator.

Run: .venv/bin/python -m bench.micro.sink_or_iterator
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from bench import paired

STREAMS, STEPS = 64, 400


def by_sinks() -> None:
    async def run() -> None:
        counts = [0] * STREAMS
        sinks = [_counter(counts, number) for number in range(STREAMS)]
        for _ in range(STEPS):
            for sink in sinks:
                sink(1)
            await asyncio.sleep(0)
        assert sum(counts) == STREAMS * STEPS

    asyncio.run(run())


def by_iterators() -> None:
    async def run() -> None:
        queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(STREAMS)]
        readers = [asyncio.create_task(_read(queue)) for queue in queues]
        for _ in range(STEPS):
            for queue in queues:
                queue.put_nowait(1)
            await asyncio.sleep(0)
        for queue in queues:
            queue.put_nowait(0)
        assert sum(await asyncio.gather(*readers)) == STREAMS * STEPS

    asyncio.run(run())


def _counter(counts: list[int], number: int) -> Callable[[int], None]:
    def sink(tokens: int) -> None:
        counts[number] += tokens

    return sink


async def _stream(queue: "asyncio.Queue[int]") -> AsyncIterator[int]:
    while tokens := await queue.get():
        yield tokens


async def _read(queue: "asyncio.Queue[int]") -> int:
    total = 0
    async for tokens in _stream(queue):
        total += tokens
    return total


def main() -> None:
    sinks, iterators, ratio = paired.compare(by_sinks, by_iterators)
    tokens = STREAMS * STEPS
    print(f"{STREAMS} streams, {STEPS} steps, CPU time a token, median of 9 interleaved pairs")
    print(f"  plain function   {sinks / tokens * 1e6:6.2f} us")
    print(f"  async iterator   {iterators / tokens * 1e6:6.2f} us")
    print(f"  ratio            {ratio}")


if __name__ == "__main__":
    main()
