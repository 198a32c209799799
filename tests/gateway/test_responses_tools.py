"""Tools of the Responses API, with OpenAI's own client library and the demo model."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tools.demo_model import tool_definitions

WEATHER: dict[str, Any] = {"type": "function", **tool_definitions.definition("get_weather")["function"]}
ASKED: dict[str, Any] = {"role": "user", "content": "What is the weather in Limora?"}
SUNNY = '{"temperature": 17, "condition": "sunny"}'


def ask(client: openai.OpenAI, conversation: list[Any], *, stream: bool, **fields: Any) -> Response:
    """Returns the greedy response."""
    wanted: dict[str, Any] = {"model": "demo", "temperature": 0, "input": conversation, **fields}
    if not stream:
        return client.responses.create(**wanted)
    with client.responses.stream(**wanted) as events:
        return events.get_final_response()


def sent_back(response: Response) -> list[Any]:
    return [item.to_dict() for item in response.output]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_call_its_result_and_the_reasoning_between_make_a_conversation(
    client: openai.OpenAI, stream: bool, effort: str
) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, {"type": "web_search"}], "reasoning": {"effort": effort}}
    first = ask(client, [ASKED], stream=stream, **fields)
    *thought, call = first.output
    assert [item.type for item in thought] == ([] if effort == "none" else ["reasoning"])
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Limora"}, "completed")
    assert first.usage is not None
    assert (first.usage.output_tokens_details.reasoning_tokens > 0) == (effort == "low")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": SUNNY}
    second = ask(client, [ASKED, *sent_back(first), result], stream=stream, **fields)
    assert second.output_text == "It is sunny in Limora, 17 degrees."


def test_reasoning_that_comes_back_only_packed_is_the_same_prompt(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "reasoning": {"effort": "low"}}
    first = ask(client, [ASKED], stream=True, include=["reasoning.encrypted_content"], **fields)
    reasoning, call = sent_back(first)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": SUNNY}
    sizes = []
    for kept in (reasoning, reasoning | {"content": []}, reasoning | {"content": [], "encrypted_content": None}):
        usage = ask(client, [ASKED, kept, call, result], stream=False, **fields).usage
        assert usage is not None
        sizes.append(usage.input_tokens)
    assert sizes[0] == sizes[1] > sizes[2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI, stream: bool) -> None:
    tool = {"type": "custom", "name": "search", "description": "Search for pages."}
    choice = {"type": "custom", "name": "search"}
    first = ask(client, [ASKED], stream=stream, tools=[tool], tool_choice=choice, max_output_tokens=200)
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert call.name == "search"
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "nothing"}
    second = ask(client, [ASKED, *sent_back(first), output], stream=stream, tools=[tool])
    assert second.status == "completed"


def test_a_tool_that_is_not_allowed_is_not_called(client: openai.OpenAI) -> None:
    time: dict[str, Any] = {"type": "function", **tool_definitions.definition("get_time")["function"]}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    (call,) = ask(client, [ASKED], stream=False, tools=[WEATHER, time], tool_choice=allowed).output
    assert call.type == "function_call"
    assert call.name == "get_time"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_follows_reasoning_that_was_closed(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "reasoning": {"effort": "low"},
        "extra_body": {"thinking_token_budget": 2},
    }
    thought, call = ask(client, [ASKED], stream=stream, **fields).output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert len(thought.content[0].text.split()) <= 3
    assert (call.type, call.status) == ("function_call", "completed")
