"""Features with a model that has learnt words: what is forced is well-formed, and what is shared is computed once."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.real.conftest import Api
from tests.real.reference import Reference
from tests.real.test_answers import STEPS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 15}, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STORY = (
    "Anna lived in a small house by the sea. Every morning she walked along the beach and collected shells. One day "
    "she found a bottle with a letter in it, written by a boy on the other side of the ocean. "
)


def text_of(choice: Any) -> str:
    return str(choice["message"]["content"])


def test_the_model_knows_what_it_has_learnt(api: Api) -> None:
    answer = api.post("/completions", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert answer["choices"][0]["text"].startswith(" Paris")


def test_a_schema_is_kept(api: Api) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = api.chat("Describe a person as JSON.", response_format=asked, max_tokens=200)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(choice)), SCHEMA)


def test_a_regular_expression_is_kept(api: Api) -> None:
    pattern = r"[A-Z][a-z]{2,8}, (19|20)[0-9]{2}"
    assert re.fullmatch(pattern, text_of(api.chat("A city and a year?", structured_outputs={"regex": pattern})))


def test_a_stop_ends_the_answer_before_itself(api: Api) -> None:
    choice = api.chat("Count from one to ten.", stop=["5", "five"], max_tokens=100)
    assert choice["finish_reason"] == "stop"
    assert "5" not in text_of(choice)
    assert re.search("4|four", text_of(choice))


def test_several_answers_are_of_one_prompt_and_differ(api: Api) -> None:
    answer = api.post(
        "/chat/completions",
        messages=[{"role": "user", "content": "Tell me something."}],
        n=4,
        temperature=1.0,
        seed=7,
        max_tokens=24,
    )
    texts = {text_of(choice) for choice in answer["choices"]}
    assert len(texts) == len(answer["choices"]) == 4


def test_log_probabilities_are_those_of_the_tokens(api: Api, reference: Reference) -> None:
    choice = api.chat("Name three fruits.", logprobs=True, top_logprobs=3, max_tokens=16)
    entries = choice["logprobs"]["content"]
    expected = reference.logprobs([*choice["prompt_token_ids"], *choice["token_ids"]])[-len(choice["token_ids"]) :]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected[: len(entries)], abs=STEPS)
    for entry in entries:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted(
            (one["logprob"] for one in entry["top_logprobs"]), reverse=True
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_well_formed(api: Api, choice: object) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    found = api.chat("What is the weather in Paris?", tools=[TOOL], **fields)
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])


def test_tools_that_may_not_be_called_are_not(api: Api) -> None:
    found = api.chat("What is the weather in Paris?", tools=[TOOL], tool_choice="none", max_tokens=24)
    assert not found["message"].get("tool_calls")
    assert text_of(found)


def test_a_shared_prompt_is_computed_once(api: Api) -> None:
    questions = ("Who lived by the sea?", "What did she find?", "Where was the boy?")
    found = [api.chat(f"{STORY * 4}\n{question}", max_tokens=8)["usage"] for question in questions]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
    for usage, count in zip(found[1:], cached[1:], strict=True):
        assert usage["prompt_tokens"] - count < 48, "only the question, and part of a block"


@pytest.mark.long
def test_a_fact_at_the_start_of_a_long_prompt_is_in_its_keys(api: Api, reference: Reference) -> None:
    text = f"The secret number is 7413. {STORY * 60}\nThe secret number is"
    ids = reference.text_ids(text)
    assert len(ids) > 2_500
    answer = api.post("/completions", prompt=ids, max_tokens=12, temperature=0, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert reference.regret(ids, answer["choices"][0]["token_ids"]) < STEPS
