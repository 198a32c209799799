"""Measures what the gateway adds to a client of the bus: to the first token, and in CPU time a token.

Run: .venv/bin/python -m bench.gateway.overhead [--pairs 101] [--rounds 9] [--streams 8]

The demo model answers the same requests over NATS, to the client library in this process, and over HTTP, as events, in
interleaved pairs: one at a time for the first token, then --streams at once for the CPU time of the gateway's process,
compared with that of this process while it reads from NATS."""

import asyncio
import time
from typing import Any

from bench import flags, http_client, streams, system
from bench.paired import show_difference
from tokenbus.client.wire.wire_client import WireClient
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


async def over_nats(client: WireClient) -> float:
    """Returns the milliseconds to the first piece of text."""
    began, first = time.perf_counter(), 0.0
    async for chunk in streams.chunks(client, request(4)):
        if chunk.text and not first:
            first = time.perf_counter() - began
    return 1e3 * first


async def over_http(url: str) -> float:
    """Returns the milliseconds to the first piece of text."""
    reply = await http_client.complete(url, body(4))
    return 1e3 * (reply.times[0] - reply.began)


async def cpu_of_client(client: WireClient, num_streams: int) -> float:
    """Returns the CPU microseconds per token of this process, which only reads."""
    began = time.process_time()
    await asyncio.gather(*(streams.drain(client, request(_TOKENS)) for _ in range(num_streams)))
    return 1e6 * (time.process_time() - began) / (num_streams * _TOKENS)


async def cpu_of_gateway(url: str, pid: int, num_streams: int) -> float:
    """Returns the CPU microseconds per token of the gateway's process."""
    began = system.cpu_seconds(pid)
    await asyncio.gather(*(http_client.complete(url, body(_TOKENS)) for _ in range(num_streams)))
    return 1e6 * (system.cpu_seconds(pid) - began) / (num_streams * _TOKENS)


async def measure(pairs: int, rounds: int, num_streams: int) -> None:
    settings = ("--threads", "1", "--context-length", "512", "--kv-tokens", str(512 * num_streams))
    async with system.started(MODEL_PATH, settings) as running, system.gateway(running) as (url, pid):
        firsts = [(await over_nats(running.client), await over_http(url)) for _ in range(pairs + 5)][5:]
        costs = [
            (await cpu_of_client(running.client, num_streams), await cpu_of_gateway(url, pid, num_streams))
            for _ in range(rounds + 1)
        ][1:]
    for title, unit, seen in (
        (f"time to the first token, {pairs} interleaved pairs", "ms", firsts),
        (f"CPU time a token, {num_streams} streams of {_TOKENS}, {rounds} interleaved pairs", "us", costs),
    ):
        print(f"demo model, {title}")
        show_difference(("client of the bus", "gateway"), unit, seen)


def main() -> None:
    options = flags.parser(__doc__, pairs=101, rounds=9, streams=8).parse_args()
    asyncio.run(measure(options.pairs, options.rounds, options.streams))


if __name__ == "__main__":
    main()
