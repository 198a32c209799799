"""Tests that a worker survives four times its capacity, with clients that cancel and time out.

Run: .venv/bin/python -m bench.serving.soak [--minutes 10] [--over 4]

One worker serves the demo model with 8 running and 8 waiting sequences. Four times as many clients send a new request
as soon as they have their answer. The run fails if a request does not end in exactly one terminal, if it is refused
with anything but `overloaded` or `deadline_exceeded`, if memory grows, or if something is left over at the end."""

import asyncio
import collections
import random
import time
from pathlib import Path

from bench import flags, system
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_SEQUENCES, _WAITING = 8, 8
_HOST_CACHE_MIB = 32
"""A KV cache so small that it is full and evicting before memory is first measured."""
_WARM_UP_S = 60.0
_GROWTH = 1.1
_REFUSALS = {"overloaded", "deadline_exceeded"}
_FAMILIES = ["Tell me about the fox and the river. " * count for count in (1, 4, 9, 16)]


class Tally:
    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []


async def ask(client: WireClient, rng: random.Random, tally: Tally) -> None:
    request = messages.GenerateRequest(
        prompt=rng.choice(_FAMILIES) + str(rng.randrange(40)),
        max_tokens=rng.choice([1, 8, 40, 200, 500]),
        ignore_eos=True,
        priority=rng.randrange(-3, 4),
        cache_prompt=rng.random() > 0.1,
        cache_salt=rng.choice(["", "a"]),
        timeout_ms=rng.choice([None, None, 300.0, 3_000.0]),
    )
    cancel_after = rng.randrange(1, 60) if rng.random() < 0.3 else None
    stream = client.generate("m", request)
    terminals = tokens = 0
    async for chunk in stream:
        tokens += chunk.tokens
        if cancel_after is not None and tokens >= cancel_after:
            cancel_after = None
            stream.cancel()
        if chunk.finish_reason is not None:
            terminals += 1
            error = chunk.error or None
            code = error.code if error else None
            tally.ends[str(code or chunk.finish_reason)] += 1
            if code is not None and code not in _REFUSALS:
                tally.wrong.append(f"{code}: {error}")
            if error and code == "overloaded":
                await asyncio.sleep(min(5.0, (error.retry_after_ms or 0.0) / 1e3))
    if terminals != 1:
        tally.wrong.append(f"{terminals} terminals")


async def measure(minutes: float, over: int) -> None:
    sizes = ("--max-num-seqs", str(_SEQUENCES), "--max-waiting", str(_WAITING), "--expected-tokens", "64")
    memory = ("--kv-tokens", "4096", "--context-length", "1024", "--host-cache-mib", str(_HOST_CACHE_MIB))
    tally = Tally()
    async with system.running(MODEL_PATH, "--threads", "1", *sizes, *memory) as client:
        (card,) = await system.cards(client)
        ends_at = time.monotonic() + 60 * minutes

        async def live(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < ends_at:
                await ask(client, rng, tally)

        lives = [asyncio.create_task(live(seed)) for seed in range(over * (_SEQUENCES + _WAITING))]
        resident = await _watch(card, ends_at, lives)
        await asyncio.gather(*lives)
        await asyncio.sleep(1.0)
        load = (await system.cards(client))[0].load
    print(f"{minutes:g} minutes, {len(lives)} clients: {sum(tally.ends.values())} requests, {dict(tally.ends)}")
    print(f"  resident memory of frontend and engine, MiB, each half minute: {resident}")
    print(f"  at the end: {load}")
    assert not tally.wrong, tally.wrong[:5]
    assert load is not None
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0), load
    steady = resident[int(_WARM_UP_S / 30) :]
    assert len(steady) < 2 or max(steady[-1]) <= _GROWTH * max(steady[0]), "memory has grown"


async def _watch(card: messages.Card, ends_at: float, lives: list[asyncio.Task[None]]) -> list[tuple[int, int]]:
    """Records the memory of frontend and engine every half minute."""
    sizes = []
    while time.monotonic() < ends_at and not any(life.done() for life in lives):
        sizes.append((_resident_mib(card.pids.front), _resident_mib(card.pids.engine)))
        await asyncio.sleep(min(30.0, max(0.1, ends_at - time.monotonic())))
    return sizes


def _resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4_096 >> 20


def main() -> None:
    parser = flags.parser(__doc__, over=4)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    asyncio.run(measure(options.minutes, options.over))


if __name__ == "__main__":
    main()
