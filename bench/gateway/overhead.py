"""Measures what the gateway adds to a client of the bus: to the first token, and in CPU time a token.

Run: .venv/bin/python -m bench.gateway.overhead [--pairs 101] [--rounds 9] [--streams 8]

The demo model answers the same requests over NATS, to the client library in this process, and over HTTP, as events, in
interleaved pairs: one at a time for the first token, then --streams at once for the CPU time of the gateway's process,
compared with that of this process while it reads from NATS."""

import asyncio
import statistics
import time
from typing import Any

from bench import flags, system
from bench.gateway import sse
from tokenbus.client import Client
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_TOKENS = 200
_ASKED = "Tell me a story about a fox."


def request(tokens: int) -> messages.GenerateRequest:
    asked = [messages.ChatMessage(role="user", content=_ASKED)]
    return messages.GenerateRequest(messages=asked, max_tokens=tokens, temperature=0, ignore_eos=True)


def body(tokens: int) -> dict[str, Any]:
    asked = [{"role": "user", "content": _ASKED}]
    return {"model": "m", "messages": asked, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def over_nats(client: Client) -> float:
    """Returns the seconds to the first piece of text."""
    began, first = time.perf_counter(), 0.0
    async for chunk in client.generate("m", request(4)):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        if chunk.text and not first:
            first = time.perf_counter() - began
    return first


async def over_http(url: str) -> float:
    """Returns the seconds to the first piece of text."""
    reply = await sse.complete(url, body(4))
    return reply.times[0] - reply.began


async def cpu_of_client(client: Client, streams: int) -> float:
    """Returns the CPU seconds per token of this process, which only reads."""

    async def read() -> None:
        async for chunk in client.generate("m", request(_TOKENS)):
            if chunk.error:
                raise SystemExit(f"the system refused: {chunk.error.message}")

    began = time.process_time()
    await asyncio.gather(*(read() for _ in range(streams)))
    return (time.process_time() - began) / (streams * _TOKENS)


async def cpu_of_gateway(url: str, pid: int, streams: int) -> float:
    """Returns the CPU seconds per token of the gateway's process."""
    began = system.cpu_seconds(pid)
    await asyncio.gather(*(sse.complete(url, body(_TOKENS)) for _ in range(streams)))
    return (system.cpu_seconds(pid) - began) / (streams * _TOKENS)


async def measure(pairs: int, rounds: int, streams: int) -> None:
    settings = ("--threads", "1", "--context-length", "512", "--kv-tokens", str(512 * streams))
    async with (
        system.started(MODEL_PATH, settings) as running,
        sse.gateway(running.nats_url, running.folder) as (url, pid),
    ):
        firsts = [(await over_nats(running.client), await over_http(url)) for _ in range(pairs + 5)][5:]
        costs = [
            (await cpu_of_client(running.client, streams), await cpu_of_gateway(url, pid, streams))
            for _ in range(rounds + 1)
        ][1:]
    for title, scale, unit, seen in (
        (f"time to the first token, {pairs} interleaved pairs", 1e3, "ms", firsts),
        (f"CPU time a token, {streams} streams of {_TOKENS}, {rounds} interleaved pairs", 1e6, "us", costs),
    ):
        print(f"demo model, {title}")
        columns = {
            "client of the bus": [one for one, _ in seen],
            "gateway": [other for _, other in seen],
            "difference": [other - one for one, other in seen],
        }
        for name, column in columns.items():
            low, middle, high = (scale * value for value in statistics.quantiles(column, n=4))
            print(f"  {name:<18} {middle:7.2f} {unit} (quartiles {low:.2f} to {high:.2f})")


def main() -> None:
    options = flags.parser(__doc__, pairs=101, rounds=9, streams=8).parse_args()
    asyncio.run(measure(options.pairs, options.rounds, options.streams))


if __name__ == "__main__":
    main()
