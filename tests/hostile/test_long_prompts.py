"""Prompts that are far too long cost a router little and do not delay other requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.hostile.scale import times
from tests.support.exact_client import until_ready
from tests.support.system import System

TEXT = ("the fox sat on a hill and looked at the owl that lives in an old tree by the river. " * 5_000)[:360_000]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def test_long_prompts_are_refused_and_the_router_keeps_nothing_of_them(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    sum_of_two = {"messages": [{"role": "user", "content": "What is 20 + 22?"}], "temperature": 0}
    answer = (await bare.ask(sum_of_two)).text
    before = system.memory_bytes("router")
    for _ in range(times(1, 20)):
        long = [bare.ask({"prompt": TEXT}) for _ in range(30)]
        long += [bare.ask({"messages": [{"role": "user", "content": TEXT}]}) for _ in range(5)]
        *refused, answered = await asyncio.gather(*long, bare.ask(sum_of_two))
        assert answered.text == answer
        assert {one.messages[-1]["error"]["code"] for one in refused} == {"prompt_too_long"}
    assert system.memory_bytes("router") - before < 80_000_000
