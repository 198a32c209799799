"""Idle steps compute how the next turn of a conversation begins, where its prompt lacks the reasoning."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import Answer, RawClient
from tests.support.system import System
from tools.demo_model import tool_definitions

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
    said = {"role": "assistant", "content": first.text}
    _, later = await turn(bare, [QUESTION, said, {"role": "user", "content": "And 40 + 2?"}])
    assert later["cached_tokens"] == computed["cached_tokens"] + computed["tokens"]
    assert later["cached_tokens"] > usage["prompt_tokens"]


async def test_the_result_of_a_call_finds_the_call_computed(system: System) -> None:
    system.worker("w1")
    bare = await system.connect()
    await until_ready(bare, 1)
    tools = [tool_definitions.definition("get_weather")]
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    first, usage = await turn(bare, [question], tools=tools, tool_choice="required", reasoning={"max_tokens": 3})
    assert reasoning_of(first)
    await system.until_logged("w1", "next_turn_computed")
    calls = [
        {"id": call["id"], "type": "function", "function": call["function"]}
        for message in first.messages
        for call in message.get("tool_calls", [])
        if "id" in call
    ]
    arguments = "".join(
        call["function"]["arguments"] for message in first.messages for call in message.get("tool_calls", [])
    )
    calls[0]["function"] = {"name": "get_weather", "arguments": arguments}
    said = {"role": "assistant", "content": first.text, "tool_calls": calls[:1]}
    _, later = await turn(bare, [question, said, {"role": "tool", "content": "It rains."}], tools=tools)
    assert later["cached_tokens"] > usage["prompt_tokens"]


async def test_a_worker_that_is_not_to_computes_nothing_ahead(system: System) -> None:
    system.worker("w1", "--no-speculative-prefill")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert "next_turns" not in card["features"]
    first, usage = await turn(bare, [QUESTION], regex=WORDS)
    assert reasoning_of(first)
    said = {"role": "assistant", "content": first.text}
    _, later = await turn(bare, [QUESTION, said, {"role": "user", "content": "And 40 + 2?"}])
    assert later["cached_tokens"] < usage["prompt_tokens"]
