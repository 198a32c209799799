"""Idle steps compute how the next turn of a conversation begins, where its prompt lacks the reasoning."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import Answer, RawClient
from tests.support.system import System

QUESTION = {"role": "user", "content": "What is 12 + 30?"}
WORDS = "([a-z]{5} ){12}[.]"
ASKED: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0, "max_tokens": 200}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    system.router("router")
    yield system
    await system.stop()


async def turn(bare: RawClient, messages: list[dict[str, Any]], **fields: Any) -> tuple[Answer, dict[str, int]]:
    answer = await bare.ask(ASKED | {"messages": messages} | fields)
    assert "error" not in answer.terminals[0], answer.terminals
    return answer, answer.terminals[0]["usage"]


def reasoning_of(answer: Answer) -> str:
    return "".join(message.get("reasoning", "") for message in answer.messages)


async def test_the_next_turn_of_a_client_that_drops_reasoning_finds_the_answer_computed(system: System) -> None:
    system.worker("w1")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert "next_turns" in card["features"]
    first, usage = await turn(bare, [QUESTION], regex=WORDS)
    assert reasoning_of(first)
    await system.until_logged("w1", "next_turn_computed")
    (computed,) = system.logged("w1", "next_turn_computed")
    print(usage, computed)
    said = {"role": "assistant", "content": first.text}
    _, later = await turn(bare, [QUESTION, said, {"role": "user", "content": "And 40 + 2?"}])
    assert later["cached_tokens"] == computed["cached_tokens"] + computed["tokens"]
    assert later["cached_tokens"] > usage["prompt_tokens"]
    print(later)
