"""Conversations on three replicas go to the one with their prefix, and the router knows how much of it is cached."""

import asyncio
from typing import Any

from tests.support.exact_client import until_ready
from tests.support.raw_client import RawClient
from tests.support.system import System

_CONVERSATIONS, _TURNS = 9, 4
_OPENINGS = ["Tell me about the fox.", "What is 20 + 22?", "Where does the owl live?", "Who is the king of the sea?"]


async def _converse(bare: RawClient, number: int, policy: str) -> list[dict[str, Any]]:
    """Runs a conversation whose prompts contain all turns before; returns the terminals."""
    said = [{"role": "user", "content": f"{_OPENINGS[number % 4]} {'Please. ' * (70 + number)}"}]
    terminals = []
    for turn in range(_TURNS):
        answer = await bare.ask(
            {
                "messages": said,
                "max_tokens": 24,
                "temperature": 0,
                "cache_salt": policy,
                "routing": {"policy": policy, "explain": True},
            }
        )
        terminals.append(answer.messages[-1])
        said.append({"role": "assistant", "content": answer.text})
        said.append({"role": "user", "content": f"And then, {turn}?"})
    return terminals


async def _all(bare: RawClient, policy: str) -> list[dict[str, Any]]:
    conversations = await asyncio.gather(*(_converse(bare, number, policy) for number in range(_CONVERSATIONS)))
    return [terminal for terminals in conversations for terminal in terminals]


def _evaluated(terminals: list[dict[str, Any]]) -> int:
    return sum(one["usage"]["prompt_tokens"] - one["usage"]["cached_tokens"] for one in terminals)


async def test_conversations_stay_where_they_are_held_and_the_router_predicts_what_is_cached(system: System) -> None:
    system.router("router")
    # without copies in host memory, no blocks are fetched: what a worker has computed stays where it is
    system.worker("worker", "--replicas", "3", "--kv-block-size", "8", "--host-cache-mib", "0")
    bare = await system.connect()
    await until_ready(bare, 3)
    by_turns = await _all(bare, "round_robin")
    by_cache = await _all(bare, "kv")
    assert all(one["finish_reason"] in ("stop", "length") for one in by_cache)
    assert len({one["worker_id"] for one in by_cache}) == 3, "load is shared too"
    assert _evaluated(by_cache) <= 0.5 * _evaluated(by_turns), (_evaluated(by_cache), _evaluated(by_turns))
    near = 0
    for one in by_cache:
        report = one["routing"]
        assert report["chosen"] == one["worker_id"]
        assert len(report["candidates"]) == 3
        (chosen,) = [each for each in report["candidates"] if each["worker_id"] == one["worker_id"]]
        assert chosen["cost"] == min(each["cost"] for each in report["candidates"])
        near += abs(8 * chosen["overlap_blocks"] - one["usage"]["cached_tokens"]) <= 8
    assert near >= 0.95 * len(by_cache), f"{near} of {len(by_cache)}"
