"""The demo model calls tools, answers with their results, and reasons when it is asked to, over the bus."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.in_part import in_part
from tests.support.system import running_up
from tests.support.wire_answers import answer_of
from tokenbus.client.answer import Answer, AnswerBuilder
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire.messages import ChatMessage, Chunk
from tools.demo_model import corpus, tool_definitions, tools

TOOLS = [tool_definitions.definition("get_weather"), tool_definitions.definition("multiply")]
ASKED = ChatMessage(role="user", content="What is the weather in Limora?")


@pytest.fixture(scope="module", params=in_part(["gguf", "onnx"], 2))
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_up("--workers", "1", "--engine", request.param) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(url) as client:
        yield client


async def ask(
    client: WireClient, conversation: list[ChatMessage], *, thinks: bool | None = None, **fields: Any
) -> Answer:
    """Returns the greedy answer. `thinks` sets the template's switch."""
    if thinks is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    return await answer_of(client.generate("demo", messages=conversation, temperature=0, **fields))


def question(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def with_results(conversation: list[ChatMessage], said: Answer, *results: str) -> list[ChatMessage]:
    """Returns a conversation that goes on with calls and their results."""
    answered = [
        ChatMessage(role="tool", tool_call_id=call.id, content=result)
        for call, result in zip(said.tool_calls, results, strict=True)
    ]
    return [*conversation, said.to_message(), *answered]


def calls_of(said: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.tool_calls]


async def test_its_format_is_found_and_its_features_are_on_its_card(client: WireClient) -> None:
    (served,) = (await client.models()).models
    assert {"tools", "reasoning"} <= set(served.features)


async def test_a_call_is_streamed_and_its_result_answered_with(client: WireClient) -> None:
    builder = AnswerBuilder()
    chunks: list[Chunk] = []
    async for chunk in client.generate("demo", messages=[ASKED], tools=TOOLS, temperature=0):
        chunks.append(chunk)
        builder.add(chunk)
    said = builder.build()
    assert (said.text, said.reasoning, said.finish_reason) == ("", "", "tool_calls")
    (call,) = said.tool_calls
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Limora"}')
    deltas = [one for chunk in chunks for one in chunk.tool_calls or ()]
    ends = [one.arguments_offset + len(one.function.arguments) for one in deltas]
    assert [one.arguments_offset for one in deltas] == [0, *ends[:-1]]
    again = with_results([ASKED], said, '{"temperature": 17, "condition": "sunny"}')
    final = await ask(client, again, tools=TOOLS)
    assert (final.text, final.tool_calls) == ("It is sunny in Limora, 17 degrees.", [])
    assert final.finish_reason == "stop"


async def test_two_cities_are_two_calls(client: WireClient) -> None:
    asked = question("What is the weather in Limora and Teska?")
    said = await ask(client, asked, tools=TOOLS)
    assert calls_of(said) == [("get_weather", {"city": "Limora"}), ("get_weather", {"city": "Teska"})]
    final = await ask(client, with_results(asked, said, "sunny, 17 degrees", "rainy, 9 degrees"), tools=TOOLS)
    assert final.text == "It is sunny in Limora, 17 degrees. It is rainy in Teska, 9 degrees."


async def test_reasoning_is_told_apart_where_it_is_asked_for(client: WireClient) -> None:
    asked = question("What is 27 + 15?")
    said = await ask(client, asked, thinks=True)
    assert (said.reasoning, said.text) == ("7 + 5 = 12, carry 1. 2 + 1 + 1 = 4.", "27 + 15 = 42.")
    for thinks in (False, None):
        said = await ask(client, asked, thinks=thinks)
        assert (said.reasoning, said.text) == ("", "27 + 15 = 42.")


async def test_it_reasons_before_a_call_and_before_the_answer(client: WireClient) -> None:
    said = await ask(client, [ASKED], thinks=True, tools=TOOLS)
    assert said.reasoning == "I need the weather in Limora, so I call get_weather."
    assert (said.text, calls_of(said)) == ("", [("get_weather", {"city": "Limora"})])
    final = await ask(client, with_results([ASKED], said, "foggy, 3 degrees"), thinks=True, tools=TOOLS)
    assert (final.reasoning, final.text) == (tools.ANSWERING, "It is foggy in Limora, 3 degrees.")


@pytest.mark.parametrize(
    ("asked", "right"),
    [
        ("What is the capital of Avaria?", "The capital of Avaria is Limora."),
        ("What is 12 + 30?", "12 + 30 = 42."),
        ("What time is it in Limora?", "I have no tool for the time."),
    ],
)
async def test_it_answers_in_words_where_no_tool_fits(client: WireClient, asked: str, right: str) -> None:
    said = await ask(client, question(asked), tools=TOOLS)
    assert (said.text, said.tool_calls) == (right, [])


async def test_a_required_call_is_the_one_that_it_would_make(client: WireClient) -> None:
    said = await ask(client, question("What is 12 * 30?"), tools=TOOLS, tool_choice="required")
    assert (said.text, calls_of(said)) == ("", [("multiply", {"a": 12, "b": 30})])


@pytest.mark.long
async def test_random_tasks_with_random_tools_are_called_and_answered(client: WireClient) -> None:
    rng = random.Random(20_260)
    known = [country.capital for country in corpus.COUNTRIES]

    async def solve(task: tools.Task, offered: list[dict[str, Any]]) -> tuple[list[tuple[str, Any]], str]:
        asked = question(task.question)
        said = await ask(client, asked, tools=offered)
        results = task.results[: len(said.tool_calls)]
        final = await ask(client, with_results(asked, said, *results), tools=offered)
        return calls_of(said), final.text

    tasks, offers = [], []
    while len(tasks) < 60:
        names, definitions = tool_definitions.offer(rng)
        tasks.append(tools.task(rng, rng.choice(sorted(names)), known))
        offers.append(definitions)
    found = await asyncio.gather(*map(solve, tasks, offers))
    assert found == [([(task.tool, task.arguments)], task.answer) for task in tasks]
