"""Anthropic's library for Python, as its users call it."""

import os

import anthropic
from checking import run

client = anthropic.Anthropic(
    base_url=os.environ["ROOT_URL"],
    api_key="none",
    max_retries=0,
    timeout=60,
    _strict_response_validation=True,  # a response of another type than the library's is an error
)
QUESTION = [{"role": "user", "content": "What is the capital of Avaria?"}]
GREEDY = {"temperature": 0}
ANSWER = "The capital of Avaria is Limora."
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Tells the weather", "input_schema": SCHEMA}
COMPARE = [{"role": "user", "content": "Which is larger, 9.11 or 9.9?"}]
LONG = [{"role": "user", "content": "Say something long."}]


def messages() -> None:
    answer = client.messages.create(model="demo", messages=QUESTION, max_tokens=50, extra_body=GREEDY)
    assert answer.content[0].text == ANSWER, answer
    assert answer.stop_reason == "end_turn", answer


def streaming() -> None:
    with client.messages.stream(model="demo", messages=QUESTION, max_tokens=50, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens > 0


def tools_round_trip() -> None:
    first = client.messages.create(model="scripted", messages=WEATHER, max_tokens=500, tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input, first.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use"), first
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"}
    turns = [*WEATHER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(model="scripted", messages=turns, max_tokens=500, tools=[TOOL])
    assert final.content[-1].text == "It is 7 degrees in Oslo.", final


def tools_streamed() -> None:
    with client.messages.stream(model="scripted", messages=WEATHER, max_tokens=500, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Oslo"}], final


def thinking() -> None:
    enabled = {"type": "enabled", "budget_tokens": 1_024}
    answer = client.messages.create(model="scripted", messages=COMPARE, max_tokens=2_000, thinking=enabled)
    assert [block.type for block in answer.content] == ["thinking", "text"], answer
    assert answer.content[0].thinking == "Compare 0.11 and 0.90.", answer


def counted_tokens() -> None:
    counted = client.messages.count_tokens(model="demo", messages=QUESTION)
    answer = client.messages.create(model="demo", messages=QUESTION, max_tokens=5)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage)


def errors() -> None:
    for change, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "fox " * 9_000}]}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{"model": "demo", "messages": QUESTION, "max_tokens": 5} | change)
        except kind as error:
            assert error.body.get("type") == "error", error
        else:
            raise AssertionError(f"no {kind.__name__}")


def cancel() -> None:
    with client.messages.stream(model="scripted", messages=LONG, max_tokens=60_000) as stream:
        next(iter(stream.text_stream))


run(messages, streaming, tools_round_trip, tools_streamed, thinking, counted_tokens, errors, cancel)
