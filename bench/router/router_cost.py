"""Measures a router's costs: the CPU time per request, and the added latency.

Run: .venv/bin/python -m bench.router.router_cost [--requests 1000] [--at-once 16] [--rounds 7] [--against ../other]

The demo model serves behind a real router and broker. Prompts have 1,000 tokens, all cached, and one token is
generated; each round sends token ids, the same prompt as text, and the ids in packed form. The router's CPU time is
that of its process, less what it spends idle; that of a text is compared with `tokenizers` encoding the same text in
this process. The latency is measured to the first message, and compared with a bare exchange of the same bytes over
three hops (client, forwarder, responder, client). With `--against`, another checkout serves beside this one, rounds of
token ids alternate (A B A B), and the ratio is this checkout's CPU time by the other's. The other needs its own
environment (`make .venv/.ready` there)."""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from nats.aio.client import Client as Nats
from tokenizers import Tokenizer

from bench import flags, system
from bench.bare_hops import FIRST_HOP, Wire, bare_hops
from bench.paired import interleave, quartiles, show
from bench.system import cpu_seconds
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import block_hash, codec, internal, subjects

_TOKENS = 1_000
_WORKER = "bench"
_SUBJECT = subjects.Subjects().generate("m")
_STORY = "Once upon a time there was a fox who lived by the river . 12 + 30 = 42 ."
_parts = codec.Decoder(internal.TokenizerPart)


async def _cpu_us(ask: Callable[[], Awaitable[float]], count: int, at_once: int, pid: int, idle: float) -> float:
    """Returns the CPU microseconds that a process spends on each request, with `at_once` of them in flight."""

    async def some() -> None:
        for _ in range(count // at_once):
            await ask()

    before, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(some() for _ in range(at_once)))
    spent = cpu_seconds(pid) - before - idle * (time.perf_counter() - began)
    return spent / (count // at_once * at_once) * 1e6


async def _first_ms(ask: Callable[[], Awaitable[float]], count: int) -> float:
    """Returns the median milliseconds to the first message, with one request in flight."""
    return statistics.median([await ask() for _ in range(count)]) * 1e3


@contextlib.asynccontextmanager
async def _serving(python: Path = Path(sys.executable)) -> AsyncIterator[tuple[Wire, int]]:
    """Yields a client of a system, and its router's process id."""
    worker = ("--threads", "1", "--worker-id", _WORKER)
    async with system.started(MODEL_PATH, worker, python=python) as running, bare_hops(running.nats_url) as wire:
        yield wire, running.router_pid


async def measure(options: argparse.Namespace) -> None:
    async with _serving() as (wire, pid):
        await _measure(options, wire, await _tokenizer(wire.nats), pid)


async def measure_against(other: Path, options: argparse.Namespace) -> None:
    async with _serving(other / ".venv/bin/python") as theirs, _serving() as ours:
        _, token_ids = _prompt(await _tokenizer(ours[0].nats))
        payload = _requests({"token_ids": token_ids})[0]

        async def side(wire: Wire, pid: int) -> Callable[[int], Awaitable[tuple[float, float]]]:
            ask = partial(wire.first_s, _SUBJECT, payload)
            await ask()
            idle = await _idle_cores(pid)

            async def cpu_us(_: int) -> tuple[float, float]:
                together = await _cpu_us(ask, options.requests, options.at_once, pid, idle)
                return together, await _cpu_us(ask, options.requests // 4, 1, pid, idle)

            return cpu_us

        seen = await interleave(await side(*theirs), await side(*ours), options.rounds)
    for name, at in (f"{options.at_once} at a time", 0), ("one at a time", 1):
        print(f"CPU of a request of token ids, {name}")
        show(("the other", "this checkout"), "µs", [(first[at], second[at]) for first, second in seen])


def _requests(*prompts: dict[str, Any]) -> list[bytes]:
    return [json.dumps(one | {"max_tokens": 1, "temperature": 0}).encode() for one in prompts]


async def _idle_cores(pid: int) -> float:
    """Returns the share of a core that a process uses without requests."""
    before = cpu_seconds(pid)
    await asyncio.sleep(5)
    return (cpu_seconds(pid) - before) / 5


async def _measure(options: argparse.Namespace, wire: Wire, tokenizer: Tokenizer, pid: int) -> None:
    text, token_ids = _prompt(tokenizer)
    packed_ids = base64.b64encode(block_hash.pack_token_ids(token_ids)).decode()
    ids, texts, packed = _requests({"token_ids": token_ids}, {"prompt": text}, {"token_ids": packed_ids})
    for payload in (ids, texts, packed):
        await wire.first_s(_SUBJECT, payload)
    idle = await _idle_cores(pid)
    rows: list[tuple[float, ...]] = []
    for _ in range(options.rounds):
        asks = [partial(wire.first_s, _SUBJECT, one) for one in (ids, texts, packed)]
        cpu = [await _cpu_us(ask, options.requests, options.at_once, pid, idle) for ask in asks]
        alone = await _cpu_us(asks[0], options.requests // 4, 1, pid, idle)
        bare = await _first_ms(lambda: wire.first_s(FIRST_HOP, ids), options.requests // 4)
        first = [await _first_ms(ask, options.requests // 4) for ask in asks[:2]]
        rows.append((cpu[0], cpu[2], alone, cpu[1], _encode_us(tokenizer, text), bare, *first))
    _show(rows, idle)


async def _tokenizer(connection: Nats) -> Tokenizer:
    """Fetches the model's tokenizer from the worker, as a router does."""
    names, inbox, parts = subjects.Subjects(), connection.new_inbox(), list[internal.TokenizerPart]()
    subscription = await connection.subscribe(inbox)
    await connection.publish(names.worker("m", _WORKER, "tokenizer"), b"", reply=inbox)
    while not parts or len(parts) < parts[0].parts:
        parts.append(_parts.decode((await subscription.next_msg(timeout=5)).data))
    await subscription.unsubscribe()
    return Tokenizer.from_str(tokenizer_bundle.from_parts(parts, parts[0].digest).tokenizer_json)


def _prompt(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Returns a text of about `_TOKENS` tokens, and its token ids."""
    words = itertools.cycle(_STORY.split())
    text = ""
    while len(tokenizer.encode(text, add_special_tokens=False).ids) < _TOKENS:
        text += " " + " ".join(itertools.islice(words, 20))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:_TOKENS]
    return tokenizer.decode(ids), ids


def _encode_us(tokenizer: Tokenizer, text: str, count: int = 200) -> float:
    began = time.process_time()
    for _ in range(count):
        tokenizer.encode(text, add_special_tokens=False)
    return (time.process_time() - began) / count * 1e6


def _show(rows: list[tuple[float, ...]], idle: float) -> None:
    ids, packed, alone, text, encode, bare, ids_ms, text_ms = zip(*rows, strict=True)
    beyond = [one - other for one, other in zip(text, encode, strict=True)]
    added = [one - other for one, other in zip(ids_ms, bare, strict=True)]
    added_text = [one - other - spent / 1e3 for one, other, spent in zip(text_ms, bare, encode, strict=True)]
    print(f"idle router: {idle * 100:.1f} % of a core")
    for name, values, unit in (
        ("CPU of a request of token ids", ids, "µs"),
        ("the same, packed", packed, "µs"),
        ("a list, one at a time", alone, "µs"),
        ("CPU of one of text", text, "µs"),
        ("tokenizers' encode alone", encode, "µs"),
        ("CPU of text beyond that", beyond, "µs"),
        ("bare three hops, p50", bare, "ms"),
        ("added p50, ids", added, "ms"),
        ("added p50, text, beyond encode", added_text, "ms"),
    ):
        low, middle, high = quartiles(values)
        print(f"{name:34}{middle:10.2f} {unit} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = flags.parser(__doc__, requests=1_000, rounds=7)
    parser.add_argument("--at-once", type=int, default=16, help="requests in flight while CPU time is measured")
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    asyncio.run(measure_against(options.against.resolve(), options) if options.against else measure(options))


if __name__ == "__main__":
    main()
