"""Measures the CPU time per token of a worker's frontend at 64 streams.

Run: .venv/bin/python -m bench.serving.frontend_cpu [--streams 64] [--rounds 7]

The demo model runs with full batches. The result is the frontend process's CPU time, as the kernel counts it, divided
by the tokens it published, and the same for the client in this process."""

import asyncio
import statistics
import time

from bench import flags, system
from tokenbus.client import Client
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_TOKENS = 400
REQUEST = messages.GenerateRequest(prompt="Once upon a time", max_tokens=_TOKENS, temperature=0, ignore_eos=True)


async def one_round(client: Client, streams: int, front_pid: int) -> tuple[float, float]:
    """Returns the CPU seconds per token of the frontend and of this process."""

    async def read() -> None:
        async for chunk in client.generate("m", REQUEST):
            if chunk.error:
                raise SystemExit(f"the system refused: {chunk.error.message}")

    frontend, own = system.cpu_seconds(front_pid), time.process_time()
    await asyncio.gather(*(read() for _ in range(streams)))
    tokens = streams * _TOKENS
    return (system.cpu_seconds(front_pid) - frontend) / tokens, (time.process_time() - own) / tokens


async def measure(streams: int, rounds: int) -> None:
    settings = ("--threads", "1", "--max-num-seqs", str(streams), "--kv-tokens", str(512 * streams))
    async with system.running(MODEL_PATH, *settings, "--context-length", "512") as client:
        pid = (await system.card(client)).pids.front
        await one_round(client, streams, pid)
        seen = [await one_round(client, streams, pid) for _ in range(rounds)]
    print(f"demo model, {streams} streams of {_TOKENS} tokens, CPU time a token, {rounds} rounds")
    for name, column in zip(("front", "client"), zip(*seen, strict=True), strict=True):
        low, middle, high = (1e6 * value for value in statistics.quantiles(column, n=4))
        print(f"  {name:<8} {middle:6.1f} us (quartiles {low:.1f} to {high:.1f})")


def main() -> None:
    options = flags.parser(__doc__, streams=64, rounds=7).parse_args()
    asyncio.run(measure(options.streams, options.rounds))


if __name__ == "__main__":
    main()
