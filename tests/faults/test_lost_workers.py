"""Whole workers are killed one after another under load, and no client misses a byte or gets one twice.

TOKENBUS_KILLS is the number of kills: 20 by default, 200 for the run in bench/README.md."""

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.exact_client import until_idle, until_ready
from tests.support.raw_client import Answer, RawClient
from tests.support.system import System
from tokenbus.client import Client
from tokenbus.protocol.wire import messages

KILLS = int(os.environ.get("TOKENBUS_KILLS", "20"))
WORKERS = ("worker-a", "worker-b", "worker-c", "worker-d")
TOKENS = 400
"""Tokens of each stream, one every 20 ms."""
STORIES = 7
BETWEEN_KILLS = 24
"""Tokens that each stream gets between two kills: with fewer, it would be blamed for the third death."""
LIBRARY, PLAIN, WHOLE = 16, 12, 4


class Tally:
    """Counts what the clients got: the ends of their streams by kind of client, wrong texts, and gaps after a loss."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps_s: list[float] = []
        self.open: list[Answer] = []
        """The plain clients' streams, the oldest first."""

    def oldest_worker(self) -> str | None:
        """Returns the present worker of the oldest plain stream that has tokens."""
        for answer in self.open:
            if answer.num_tokens:
                return [one["worker_id"] for one in answer.messages if one.get("worker_id")][-1]
        return None

    def add(self, kind: str, end: str, text: str, expected: str) -> None:
        self.ends[f"{kind} {end}"] += 1
        is_right = text == expected if end == "length" else expected.startswith(text)
        if not is_right:
            self.wrong.append(f"{kind} {end}: {text!r}")


def body(number: int, **more: object) -> dict[str, Any]:
    return {
        "prompt": f"Story {number % STORIES}:",
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": number % STORIES,
    } | more


def start_worker(system: System, name: str) -> None:
    system.worker(name, "--engine", "sim", "--max-num-seqs", "32", "--sim-speedup", "2.5", model=Path("steps-of-50ms"))


async def kill(system: System, bare: RawClient, tally: Tally) -> None:
    """Kills and restarts the worker of the oldest plain stream; returns when all plain streams have gone on for
    a while."""
    async with asyncio.timeout(60):
        await until_ready(bare, len(WORKERS) - 1)
        while (name := tally.oldest_worker()) is None:
            await asyncio.sleep(0.05)
        wanted = {answer: answer.num_tokens + BETWEEN_KILLS for answer in tally.open}
        system.signal(name, signal.SIGKILL)
        await asyncio.to_thread(system.wait, name)
        start_worker(system, name)
        while any(not answer.terminals and answer.num_tokens < least for answer, least in wanted.items()):
            await asyncio.sleep(0.05)


async def keep_streaming(
    kind: str, number: int, bare: RawClient, client: Client, texts: list[str], tally: Tally, done: asyncio.Event
) -> None:
    while not done.is_set():
        number += 1
        expected = texts[number % STORIES]
        if kind == "library":
            await _read_library(client, body(number), expected, tally)
        else:
            await _read_plain(kind, bare, body(number, stream=kind == "plain"), expected, tally)


async def _read_library(client: Client, request: dict[str, Any], expected: str, tally: Tally) -> None:
    chunks: list[messages.Chunk] = [chunk async for chunk in client.generate("demo", **request)]
    end = chunks[-1].error.code if chunks[-1].error else str(chunks[-1].finish_reason)
    tally.add("library", end, "".join(chunk.text for chunk in chunks), expected)


async def _read_plain(kind: str, bare: RawClient, request: dict[str, Any], expected: str, tally: Tally) -> None:
    """Concatenates text in the order of arrival, like the client in the README."""
    answer = await bare.generate(request)
    attempt, heard_at, read = 1, time.monotonic(), 0
    tally.open += [answer] if kind == "plain" else []
    while not answer.terminals:
        await answer.until(read + 1)
        now = time.monotonic()
        for message in answer.messages[read:]:
            if message["text"]:
                if message["attempt"] > attempt:
                    tally.gaps_s.append(now - heard_at)
                attempt, heard_at = max(attempt, message["attempt"]), now
        read = len(answer.messages)
    assert len(answer.terminals) == 1, answer.messages[-3:]
    tally.open = [one for one in tally.open if one is not answer]
    terminal = answer.terminals[0]
    tally.add(kind, (terminal.get("error") or {}).get("code") or terminal["finish_reason"], answer.text, expected)


async def test_no_byte_is_lost_or_repeated_when_whole_workers_are_killed(system: System) -> None:
    for name in ("router-a", "router-b"):
        system.router(name)
    for name in WORKERS:
        start_worker(system, name)
    bare = await system.connect()
    await until_ready(bare, len(WORKERS))
    texts = [answer.text for answer in await asyncio.gather(*(bare.ask(body(number)) for number in range(STORIES)))]
    tally, done = Tally(), asyncio.Event()
    kinds = ["library"] * LIBRARY + ["plain"] * PLAIN + ["whole"] * WHOLE
    async with await Client.connect(system.url) as client:
        clients = [
            asyncio.create_task(keep_streaming(kind, number, bare, client, texts, tally, done))
            for number, kind in enumerate(kinds)
        ]
        for _ in range(KILLS):
            await kill(system, bare, tally)
        done.set()
        await asyncio.gather(*clients)
        await until_idle(bare)
    print(f"{KILLS} kills: {dict(tally.ends)}; gap p50 {statistics.median(tally.gaps_s):.2f} s of {len(tally.gaps_s)}")
    assert tally.wrong == []
    assert tally.ends["plain worker_lost"] <= max(1, KILLS // 10), tally.ends
    assert set(tally.ends) <= {"library length", "whole length", "plain length", "plain worker_lost"}
    assert len(tally.gaps_s) >= KILLS
