"""Open Responses: the cases of its specification, each answer and event of the types that its schema requires.

Its own runner is in its repository, and in no registry of packages: these cases follow its specification, and the types
are those of `openresponses-types`. Images and compaction are not served."""

import enum
import json
import os
from typing import Any, get_args

import httpx
from checking import run
from openresponses_types import types

BASE_URL = os.environ["BASE_URL"]
QUESTION = "What is the capital of Avaria?"
ANSWER = "The capital of Avaria is Limora."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OPENAIS = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""Events that have OpenAI's names here, as its clients look for them, and what Open Responses calls them."""


def _events() -> dict[str, Any]:
    """Returns the classes of events by the types that they are for."""
    found: dict[str, Any] = {}
    for name, kind in vars(types).items():
        if name.endswith("StreamingEvent"):
            told = kind.model_fields["type"].annotation
            names = [one.value for one in told] if is_enum(told) else get_args(told)
            found |= dict.fromkeys(names, kind)
    return found


def is_enum(told: Any) -> bool:
    return isinstance(told, type) and issubclass(told, enum.Enum)


EVENTS = _events()


def ask(**fields: Any) -> Any:
    answer = httpx.post(f"{BASE_URL}/responses", json={"model": "demo", "temperature": 0, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    types.ResponseResource.model_validate(answer.json())
    return answer.json()


def stream(**fields: Any) -> list[Any]:
    body = {"model": "demo", "temperature": 0, "stream": True, **fields}
    with httpx.stream("POST", f"{BASE_URL}/responses", json=body, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    for event in events:
        renamed = event | {"type": OPENAIS.get(event["type"], event["type"])}
        EVENTS[renamed["type"]].model_validate(renamed)
    assert events[-1]["type"] == "response.completed", events[-1]
    types.ResponseResource.model_validate(events[-1]["response"])
    return events


def said(response: Any) -> str:
    return response["output"][-1]["content"][0]["text"]


def user(text: str) -> dict[str, str]:
    return {"type": "message", "role": "user", "content": text}


def basic_response() -> None:
    found = ask(input=[user(QUESTION)])
    assert (said(found), found["status"]) == (ANSWER, "completed")


def text_as_input() -> None:
    assert said(ask(input=QUESTION)) == ANSWER


def streaming_response() -> None:
    *events, end = stream(input=[user(QUESTION)])
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == said(end["response"]) == ANSWER


def system_prompt() -> None:
    assert said(ask(input=[{"type": "message", "role": "system", "content": "Be brief."}, user(QUESTION)]))


def developer_prompt_and_instructions() -> None:
    assert said(ask(instructions="Be kind.", input=[{"role": "developer", "content": "Be brief."}, user(QUESTION)]))


def tool_calling() -> None:
    found = ask(model="scripted", input=[user("What is the weather in Oslo?")], tools=[WEATHER])
    (call,) = (item for item in found["output"] if item["type"] == "function_call")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7 degrees"}
    final = ask(model="scripted", previous_response_id=found["id"], input=[result], tools=[WEATHER])
    assert said(final) == "It is 7 degrees in Oslo."


def tool_calling_streamed() -> None:
    events = stream(model="scripted", input=[user("What is the weather in Oslo?")], tools=[WEATHER])
    kinds = [event["type"] for event in events]
    for kind in ("response.function_call_arguments.delta", "response.function_call_arguments.done"):
        assert kind in kinds, kinds
    for kind in ("response.output_item.added", "response.output_item.done"):
        items = [event["item"]["type"] for event in events if event["type"] == kind]
        assert "function_call" in items, items


def reasoning_with_a_summary() -> None:
    events = stream(model="scripted", input="Which is larger, 9.11 or 9.9?", reasoning={"summary": "auto"})
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "Compare 0.11 and 0.90."


def conversation_sent_whole() -> None:
    past = [user(QUESTION), {"type": "message", "role": "assistant", "content": ANSWER}]
    assert "42" in said(ask(input=[*past, user("What is 12 + 30?")], store=False))


def conversation_continued() -> None:
    first = ask(input=QUESTION)
    second = ask(input="What is 12 + 30?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert "42" in said(second)


def unknown_response_to_continue() -> None:
    body = {"model": "demo", "input": "hi", "previous_response_id": "resp_0"}
    answer = httpx.post(f"{BASE_URL}/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "previous_response_not_found"


def settings_are_told() -> None:
    asked = {"top_p": 0.5, "presence_penalty": 0.25, "frequency_penalty": 0.5, "max_output_tokens": 20, "store": False}
    asked |= {"metadata": {"a": "b"}, "max_tool_calls": 2, "safety_identifier": "me", "prompt_cache_key": "key"}
    found = ask(input=QUESTION, **asked)
    assert {name: found[name] for name in asked} == asked


run(
    basic_response,
    text_as_input,
    streaming_response,
    system_prompt,
    developer_prompt_and_instructions,
    tool_calling,
    tool_calling_streamed,
    reasoning_with_a_summary,
    conversation_sent_whole,
    conversation_continued,
    unknown_response_to_continue,
    settings_are_told,
)
