"""Measures the CPU time per token of a worker's frontend at 64 streams.

Run: .venv/bin/python -m bench.serving.frontend_cpu [--streams 64] [--rounds 7]

The demo model runs with full batches. The result is the frontend process's CPU time, as the kernel counts it, divided
by the tokens it published, and the same for the client in this process."""

import asyncio
import time

from bench import flags, streams, system
from bench.paired import show_column
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_TOKENS = 400
REQUEST = messages.GenerateRequest(prompt="Once upon a time", max_tokens=_TOKENS, temperature=0, ignore_eos=True)


async def one_round(client: WireClient, num_streams: int, front_pid: int) -> tuple[float, float]:
    """Returns the CPU microseconds per token of the frontend and of this process."""
    frontend, own = system.cpu_seconds(front_pid), time.process_time()
    await asyncio.gather(*(streams.drain(client, REQUEST) for _ in range(num_streams)))
    scale = 1e6 / (num_streams * _TOKENS)
    return (system.cpu_seconds(front_pid) - frontend) * scale, (time.process_time() - own) * scale


async def measure(num_streams: int, rounds: int) -> None:
    settings = ("--threads", "1", "--max-num-seqs", str(num_streams), "--kv-tokens", str(512 * num_streams))
    async with system.running(MODEL_PATH, *settings, "--context-length", "512") as client:
        pid = (await system.cards(client))[0].pids.front
        await one_round(client, num_streams, pid)
        seen = [await one_round(client, num_streams, pid) for _ in range(rounds)]
    print(f"demo model, {num_streams} streams of {_TOKENS} tokens, CPU time a token, {rounds} rounds")
    for name, column in zip(("front", "client"), zip(*seen, strict=True), strict=True):
        show_column(name, "us", column)


def main() -> None:
    options = flags.parser(__doc__, streams=64, rounds=7).parse_args()
    asyncio.run(measure(options.streams, options.rounds))


if __name__ == "__main__":
    main()
