"""Measures the CPU time that a worker's frontend takes for a step, and for a token.

Run: .venv/bin/python -m bench.serving.frontend_cpu [--streams 64] [--rounds 7] [--tokens 400] [--against ../other]

The demo model runs with full batches. The result is the frontend's CPU time, as the kernel counts it, divided by the
tokens it published, and the same for the client in this process; a step gives each stream a token. With `--against`,
another checkout serves beside this one, rounds alternate (A B A B), and the ratio is this checkout's CPU time by the
other's. The other needs its own environment (`make .venv/.ready` there)."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import flags, streams, system
from bench.paired import interleave, quartiles, show_column
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages


async def one_round(client: WireClient, front_pid: int, num_streams: int, tokens: int) -> tuple[float, float]:
    """Returns the CPU microseconds per token of the frontend and of this process."""
    request = messages.GenerateRequest(prompt="Once upon a time", max_tokens=tokens, temperature=0, ignore_eos=True)
    frontend, own = system.main_thread_seconds(front_pid), time.process_time()
    await asyncio.gather(*(streams.drain(client, request) for _ in range(num_streams)))
    scale = 1e6 / (num_streams * tokens)
    return (system.main_thread_seconds(front_pid) - frontend) * scale, (time.process_time() - own) * scale


async def measure(num_streams: int, rounds: int, tokens: int, other: Path | None) -> None:
    sizes = ("--max-num-seqs", str(num_streams), "--kv-tokens", str(512 * num_streams), "--context-length", "512")
    async with contextlib.AsyncExitStack() as stack:

        async def start(python: Path) -> Callable[[int], Awaitable[tuple[float, float]]]:
            started = system.started(MODEL_PATH, ("--threads", "1", *sizes), python=python)
            client = (await stack.enter_async_context(started)).client
            front_pid = (await system.cards(client))[0].pids.front
            return lambda number: one_round(client, front_pid, num_streams, tokens)

        ours = await start(Path(sys.executable))
        if other is None:
            await ours(0)
            seen = [await ours(number) for number in range(rounds)]
        else:
            pairs = await interleave(await start(other / ".venv/bin/python"), ours, rounds)
            seen = [after for _, after in pairs]
    print(f"demo model, {num_streams} streams of {tokens} tokens, CPU time, {rounds} rounds")
    show_column("front, a token", "us", [front for front, _ in seen])
    show_column("front, a step", "us", [front * num_streams for front, _ in seen])
    show_column("client, a token", "us", [client for _, client in seen])
    if other is not None:
        show_column("other front, a step", "us", [before[0] * num_streams for before, _ in pairs])
        print(f"  front, this / other  {quartiles([after[0] / before[0] for before, after in pairs])}")


def main() -> None:
    parser = flags.parser(__doc__, streams=64, rounds=7, tokens=400)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    asyncio.run(measure(options.streams, options.rounds, options.tokens, options.against))


if __name__ == "__main__":
    main()
