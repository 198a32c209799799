"""Measures the cost of a long conversation's next turn in a router that remembers token ids, and in one that does not.

Run: .venv/bin/python -m bench.router.next_turn [--tokens 100000] [--pairs 9]

Two systems with a real broker, router and worker run side by side. In each pair both get the first turn of a new
conversation and then the second one, and each is cancelled once its worker computes. The CPU time of the router and its
renderer until then is shown as a ratio, for the first turn, of which nothing is remembered, and for the second."""

import argparse
import asyncio
import contextlib
import statistics
import time
from pathlib import Path

from bench.paired import quartiles
from bench.system import System, started
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_WORKER = ("--context-length", "131072", "--kv-tokens", "131072", "--threads", "1")
_MESSAGE = "The fox who lived by the river read file {number} of {name}, and found 12 + 30 = 42 there. " * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    asyncio.run(run(options.tokens, options.pairs))


async def run(tokens: int, pairs: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        without = await stack.enter_async_context(started(MODEL_PATH, _WORKER, ("--tokenization-cache-mib", "0")))
        remembering = await stack.enter_async_context(started(MODEL_PATH, _WORKER))
        reply = await without.client.tokenize("m", messages.TokenizeRequest(messages=_conversation("size", 3)))
        assert isinstance(reply.count, int), reply
        per_message = reply.count / 3
        count = int(tokens / per_message) // 2 * 2 + 1
        ratios: dict[str, list[float]] = {"first turn": [], "second turn": []}
        costs: dict[str, list[tuple[float, float]]] = {"first turn": [], "second turn": []}
        for pair in range(pairs + 1):
            chat = _conversation(f"chat {pair}", count + 2)
            for title, said in (("first turn", chat[:-2]), ("second turn", chat)):
                spent = [await _spent(one, said) for one in (without, remembering)]
                if pair:  # the first pair warms up
                    ratios[title].append(spent[1] / spent[0])
                    costs[title].append((spent[0], spent[1]))
        for title, found in ratios.items():
            before, after = (statistics.median(column) * 1e3 for column in zip(*costs[title], strict=True))
            print(f"{title} of {tokens:,} tokens: {before:.0f} ms without, {after:.0f} ms with; {quartiles(found)}")


def _conversation(name: str, count: int) -> list[messages.ChatMessage]:
    return [
        messages.ChatMessage(
            role="assistant" if number % 2 else "user", content=_MESSAGE.format(number=number, name=name)
        )
        for number in range(count)
    ]


async def _turn(system: System, said: list[messages.ChatMessage]) -> None:
    """Asks for an answer, and cancels when the prompt is being computed."""
    stream = system.client.generate("m", messages=said, max_tokens=1, return_progress=True)
    async for _ in stream:
        break
    await stream.aclose()


async def _spent(system: System, said: list[messages.ChatMessage]) -> float:
    """Returns the CPU seconds that a router and its renderer have spent on a conversation's turn."""
    before = _family_seconds(system.router_pid)
    await _turn(system, said)
    await asyncio.sleep(0.1)
    return _family_seconds(system.router_pid) - before


def _family_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and its children, exact to less than a millisecond."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own + sum(map(_family_seconds, children))


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
