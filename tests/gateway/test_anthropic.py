"""The gateway as Anthropic's own client library sees it."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam, ToolUseBlock

from tests.support.system import running_gateway

ANSWER = "The capital of Avaria is Limora."
ASKED: list[MessageParam] = [{"role": "user", "content": "What is the capital of Avaria?"}]
OPTIONS: dict[str, Any] = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
GREEDY: dict[str, Any] = OPTIONS | {"messages": ASKED, "thinking": {"type": "disabled"}}
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(base_url: str) -> Iterator[anthropic.Anthropic]:
    url = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_whole_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**GREEDY)
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [("text", ANSWER)]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "demo", "end_turn")
    assert message.id == f"msg_{message._request_id}"
    assert message.usage.output_tokens == 13


def test_a_stream_tells_the_prompts_tokens_at_its_beginning_and_all_at_its_end(client: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": "What is the capital of Borland?"}]
    numbers = []
    for _ in range(2):
        with client.messages.stream(**GREEDY | {"messages": question}) as stream:
            start = next(event for event in stream if event.type == "message_start").message.usage
            final = stream.get_final_message()
        assert (start.input_tokens, start.cache_read_input_tokens) == (
            final.usage.input_tokens,
            final.usage.cache_read_input_tokens,
        )
        numbers.append(
            (final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0), final.usage.input_tokens)
        )
    assert numbers[0][0] == numbers[1][0]
    assert numbers[1][1] < numbers[0][0], "the second prompt is cached"
    assert final.content[0].type == "text"
    assert final.content[0].text == "The capital of Borland is Teska."


async def test_the_asynchronous_client_streams_and_waits(async_client: anthropic.AsyncAnthropic) -> None:
    whole = await async_client.messages.create(**GREEDY)
    async with async_client.messages.stream(**GREEDY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == ANSWER
    assert [block.type for block in whole.content] == ["text"]
    assert final.to_dict()["content"] == whole.to_dict()["content"]


def test_reasoning_is_a_block_that_may_come_back(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**GREEDY | {"thinking": {"type": "enabled", "budget_tokens": 1_024}}) as stream:
        thought, said = stream.get_final_message().content
    assert (thought.type, said.type) == ("thinking", "text")
    follow_up: list[Any] = [*ASKED, {"role": "assistant", "content": [thought, said]}, *ASKED]
    assert client.messages.create(**GREEDY | {"messages": follow_up}).stop_reason == "end_turn"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_budget_for_thinking_is_kept_however_small(client: anthropic.Anthropic, streamed: bool) -> None:
    question: list[MessageParam] = [{"role": "user", "content": "What is 12 + 30?"}]
    lengths = []
    for budget in (1_024, 3, 0):
        fields = GREEDY | {"messages": question, "thinking": {"type": "enabled", "budget_tokens": budget}}
        if streamed:
            with client.messages.stream(**fields) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**fields)
        *thought, said = message.content
        assert said.text
        lengths.append(len(thought[0].thinking) if thought else 0)
    assert lengths[0] > 20 > lengths[1] > 0 == lengths[2]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic, streamed: bool) -> None:
    conversation: list[MessageParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    fields = GREEDY | {
        "messages": conversation,
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
    }
    if streamed:
        with client.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    weather = json.dumps({"temperature": 7, "condition": "sunny"})
    conversation += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": weather}]},
    ]
    answer = client.messages.create(**fields).content[0]
    assert answer.type == "text"
    assert "7 degrees" in answer.text


def test_stop_sequences_and_limits(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(**GREEDY, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    short = client.messages.create(**GREEDY | {"max_tokens": 3})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)


def test_an_answer_follows_its_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Limora", "Paris"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    message = client.messages.create(**GREEDY, output_config={"format": {"type": "json_schema", "schema": schema}})
    said = message.content[-1]
    assert said.type == "text"
    assert json.loads(said.text)["capital"] in ("Limora", "Paris")


def test_tokens_are_counted_as_a_message_has_them(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": ASKED, "system": "Be brief.", "tools": [WEATHER]}
    usage = client.messages.create(**OPTIONS | asked).usage
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.count_tokens(model="demo", messages=[])
    assert raised.value.body["error"]["message"] == "messages: at least one message is required"  # type: ignore[index]


def test_models_are_listed_and_found_by_name(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == ("demo", "model", 2_048)
    assert client.models.retrieve("demo") == model
    with pytest.raises(anthropic.APIStatusError) as raised:
        client.models.retrieve("nobody")
    assert raised.value.type in ("not_found_error", "api_error")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: must be at least 0 and at most 2147483647"),
        ({"messages": [{"role": "user", "content": "word " * 9_000}]}, " tokens > 2047 maximum"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type: only text"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "poem"}}}},
            "output_config.format.schema: ",
        ),
    ],
)
def test_a_bad_request_names_its_field_before_anything_is_streamed(
    client: anthropic.Anthropic, fields: dict[str, Any], message: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**GREEDY | fields, stream=stream)
    assert raised.value.type == "invalid_request_error"
    assert message in raised.value.message
    body: Any = raised.value.body
    assert body["request_id"] == raised.value.request_id


def test_a_deadline_is_an_error_that_is_not_tried_again(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.InternalServerError) as raised:
        client.messages.create(**GREEDY | {"extra_body": {"timeout_ms": 0.001}})
    assert (raised.value.status_code, raised.value.type) == (504, "timeout_error")
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_key_is_asked_for_in_anthropics_words(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, TOKENBUS_API_KEYS="secret=acme") as gateway:
        url = gateway.url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client:
            for ask in (client.models.list, lambda: client.messages.create(**GREEDY)):
                with pytest.raises(anthropic.AuthenticationError) as raised:
                    ask()
                assert raised.value.type == "authentication_error"
        with anthropic.Anthropic(base_url=url, api_key="secret") as client:
            assert [model.id for model in client.models.list()] == ["slow"]
