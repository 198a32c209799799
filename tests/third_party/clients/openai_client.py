"""OpenAI's library for Python, as its users call it."""

import json
import os
from typing import Literal

import openai
from checking import run
from pydantic import BaseModel

client = openai.OpenAI(
    base_url=os.environ["BASE_URL"],
    api_key="none",
    max_retries=0,
    timeout=60,
    _strict_response_validation=True,  # a response of another type than the library's is an error
)
QUESTION = [{"role": "user", "content": "What is the capital of Avaria?"}]
ANSWER = "The capital of Avaria is Limora."
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
COMPARE = [{"role": "user", "content": "Which is larger, 9.11 or 9.9?"}]
LONG = [{"role": "user", "content": "Say something long."}]


class Capital(BaseModel):
    city: Literal["Limora", "Paris"]
    is_large: bool


def chat() -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER, answer


def streaming() -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options=options
    )
    *events, last = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events) == ANSWER
    assert last.usage.completion_tokens > 0


def tools_round_trip() -> None:
    answer = client.chat.completions.create(model="scripted", messages=WEATHER, tools=[TOOL])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls", answer
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees"}
    # The message goes back as the library gives it, with its reasoning and its nulls.
    final = client.chat.completions.create(model="scripted", messages=[*WEATHER, message, result], tools=[TOOL])
    assert final.choices[0].message.content == "It is 7 degrees in Oslo.", final


def tools_streamed() -> None:
    with client.chat.completions.stream(model="scripted", messages=WEATHER, tools=[TOOL]) as stream:
        events = list(stream)
    called = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Oslo"}), called
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)


def schema() -> None:
    answer = client.chat.completions.parse(model="demo", messages=QUESTION, temperature=0, response_format=Capital)
    assert isinstance(answer.choices[0].message.parsed, Capital), answer


def reasoning() -> None:
    message = client.chat.completions.create(model="scripted", messages=COMPARE).choices[0].message
    assert (message.content, message.reasoning_content) == ("9.9 is larger.", "Compare 0.11 and 0.90."), message


def embeddings() -> None:
    # The library asks for base64 unless it is told otherwise, which its own strict types do not know.
    lenient = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=60)
    found = lenient.embeddings.create(model="embedder", input=["a fox", "a river"])
    plain = client.embeddings.create(model="embedder", input=["a fox", "a river"], encoding_format="float")
    assert [one.index for one in found.data] == [one.index for one in plain.data] == [0, 1]
    for one, other in zip(found.data, plain.data, strict=True):
        assert len(one.embedding) == len(other.embedding) > 1
        assert all(abs(a - b) < 1e-3 for a, b in zip(one.embedding, other.embedding, strict=True))


def completions() -> None:
    answer = client.completions.create(model="demo", prompt="12 + 30 =", max_tokens=4, temperature=0)
    assert answer.choices[0].text, answer


def responses() -> None:
    answer = client.responses.create(model="scripted", input="Which is larger, 9.11 or 9.9?", store=False)
    assert answer.output_text == "9.9 is larger.", answer


def responses_tools_round_trip() -> None:
    tool = {"type": "function", **TOOL["function"], "strict": False}
    first = client.responses.create(model="scripted", input=WEATHER, tools=[tool], store=False)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    final = client.responses.create(
        model="scripted", input=[*WEATHER, *first.output, result], tools=[tool], store=False
    )
    assert final.output_text == "It is 7 degrees in Oslo.", final


def responses_streamed() -> None:
    with client.responses.stream(model="scripted", input="Which is larger, 9.11 or 9.9?", store=False) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "9.9 is larger."


def models() -> None:
    assert {"demo", "scripted"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("demo").id == "demo"


def errors() -> None:
    for change, kind, code in (
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": "fox " * 9_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
    ):
        try:
            client.chat.completions.create(**{"model": "demo", "messages": QUESTION} | change)
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"no {kind.__name__}")


def cancel() -> None:
    with client.chat.completions.create(model="scripted", messages=LONG, max_tokens=60_000, stream=True) as stream:
        for event in stream:
            if event.choices[0].delta.content:
                break


run(
    chat,
    streaming,
    tools_round_trip,
    tools_streamed,
    schema,
    reasoning,
    embeddings,
    completions,
    responses,
    responses_tools_round_trip,
    responses_streamed,
    models,
    errors,
    cancel,
)
