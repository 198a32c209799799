"""Conversations on three replicas go to the one with their prefix, and the router knows how much of it is cached."""

import asyncio
from typing import Any

import pytest

from tests.support.exact_client import until_idle, until_ready
from tests.support.raw_client import RawClient
from tests.support.system import System

_CONVERSATIONS, _TURNS = 9, 4
_BLOCK = 8


class _Conversation:
    """A conversation whose prompts contain all turns before."""

    def __init__(self, bare: RawClient, number: int) -> None:
        self._bare = bare
        # so long that computing it takes several steps' time, whatever steps take on this machine
        self._said = [{"role": "user", "content": f"{number} is my number. {'Please. ' * (240 + number)}"}]
        self.terminals: list[dict[str, Any]] = []

    async def take_turn(self) -> None:
        request = {"messages": self._said, "max_tokens": 24, "temperature": 0, "routing": {"explain": True}}
        answer = await self._bare.ask(request)
        self.terminals.append(answer.messages[-1])
        self._said.append({"role": "assistant", "content": answer.text})
        self._said.append({"role": "user", "content": f"And then, {len(self.terminals)}?"})


@pytest.mark.long
async def test_conversations_stay_where_they_are_held_and_the_router_predicts_what_is_cached(system: System) -> None:
    system.router("router")
    # without copies in host memory, no blocks are fetched: what a worker has computed stays where it is
    system.worker("worker", "--replicas", "3", "--kv-block-size", str(_BLOCK), "--host-cache-mib", "0")
    bare = await system.connect()
    await until_ready(bare, 3)
    conversations = [_Conversation(bare, number) for number in range(_CONVERSATIONS)]
    await asyncio.gather(*(one.take_turn() for one in conversations))
    assert len({one.terminals[0]["worker_id"] for one in conversations}) == 3, "load is shared too"
    for _ in range(_TURNS - 1):
        for one in conversations:
            await until_idle(bare)  # or waiting might cost more than computing the conversation elsewhere
            await one.take_turn()
    for one in conversations:
        assert {end["finish_reason"] for end in one.terminals} <= {"stop", "length"}
        assert len({end["worker_id"] for end in one.terminals}) == 1
        for before, end in zip([None, *one.terminals], one.terminals, strict=False):
            _check_prediction(end)
            if before is not None:
                assert before["usage"]["prompt_tokens"] - end["usage"]["cached_tokens"] < _BLOCK


def _check_prediction(end: dict[str, Any]) -> None:
    report, candidates = end["routing"], end["routing"]["candidates"]
    assert (report["policy"], report["chosen"], len(candidates)) == ("kv", end["worker_id"], 3)
    (chosen,) = [each for each in candidates if each["worker_id"] == report["chosen"]]
    assert chosen["cost"] == min(each["cost"] for each in candidates)
    assert abs(_BLOCK * chosen["overlap_blocks"] - end["usage"]["cached_tokens"]) <= _BLOCK
