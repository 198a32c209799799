"""The gateway as OpenAI's own client library sees it."""

import json
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

ANSWER = "The capital of Avaria is Limora."
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Avaria?"}]
GREEDY: dict[str, Any] = {"model": "demo", "messages": ASKED, "temperature": 0}


def test_a_whole_answer(client: openai.OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(**GREEDY)
    answer = response.parse()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == f"chatcmpl-{response.headers['x-request-id']}"
    assert answer.model == "demo"
    usage = answer.usage
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (13, usage.prompt_tokens + 13)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_with_its_usage(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}) as stream:
        *events, usage = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events) == ANSWER
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[0].choices[0].delta.role == "assistant"
    assert len({event.id for event in events}) == 1
    assert usage.choices == []
    assert usage.usage.completion_tokens == 13


def test_the_librarys_own_helper_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


async def test_the_asynchronous_client_streams_and_waits(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(**GREEDY)
    assert whole.choices[0].message.content == ANSWER
    stream = await async_client.chat.completions.create(**GREEDY, stream=True)
    assert "".join([event.choices[0].delta.content or "" async for event in stream]) == ANSWER


def test_limits_stops_and_our_own_fields_reach_the_worker(client: openai.OpenAI) -> None:
    short = client.chat.completions.create(**GREEDY, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    stopped = client.chat.completions.create(**GREEDY, stop=" is", extra_body={"top_k": 1, "cache_salt": "x"})
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of Avaria", "stop")


def test_logprobs_of_each_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 13
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)
    assert "".join(one.token for one in content).startswith(ANSWER)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_follows_its_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Limora", "Paris"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    if stream:
        events = client.chat.completions.create(**GREEDY, response_format=wanted, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events)
    else:
        answer = client.chat.completions.create(**GREEDY, response_format=wanted)
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content or ""
    value = json.loads(text)
    assert value["capital"] in ("Limora", "Paris")
    assert isinstance(value["sure"], bool)


def test_other_constraints_are_fields_of_our_own(client: openai.OpenAI) -> None:
    for fields, accepted in (
        ({"regex": "Limora[.!]"}, ("Limora.", "Limora!")),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"grammar": 'root ::= "a" "b"?'}, ("a", "ab")),
    ):
        answer = client.chat.completions.create(**GREEDY, extra_body=fields)
        assert answer.choices[0].message.content in accepted


def refusals(client: openai.OpenAI, model: str) -> tuple[object, object]:
    """The statuses and bodies in which a question about a model and a request for it end."""
    with pytest.raises(openai.APIStatusError) as listed:
        client.models.retrieve(model)
    with pytest.raises(openai.APIStatusError) as asked:
        client.chat.completions.create(**GREEDY | {"model": model})
    return (listed.value.status_code, listed.value.body), (asked.value.status_code, asked.value.body)


@pytest.mark.parametrize(
    "budget",
    [
        {"reasoning": {"max_tokens": 4}},
        {"thinking_token_budget": 4},
        {"reasoning_budget_tokens": 4},
        {"thinking_budget_tokens": 4},
        {"reasoning": {"effort": "low"}, "max_tokens": 20},
    ],
)
def test_reasoning_is_closed_when_its_budget_is_spent(client: openai.OpenAI, budget: dict[str, Any]) -> None:
    asked: dict[str, Any] = GREEDY | {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    counts = []
    for fields in (thinking, thinking | budget):
        answer = client.chat.completions.create(**asked, extra_body=fields)
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        counts.append(answer.usage.completion_tokens_details.reasoning_tokens or 0)
    assert 4 < counts[1] < 12 < counts[0]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").created > 1_700_000_000
    listed, asked = refusals(client, "org/nobody:Q4")
    until = time.monotonic() + 2  # a list of models is used for a second, and the answer changes once
    while listed != asked and time.monotonic() < until:
        listed, asked = refusals(client, "org/nobody:Q4")
    assert listed == asked


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name", "invalid_request"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "poem"}},
                }
            },
            "response_format.json_schema.schema",
            "invalid_request",
        ),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages", "invalid_request"),
        ({"messages": [{"role": "user", "content": "word " * 9_000}]}, "messages", "context_length_exceeded"),
    ],
)
def test_a_bad_request_names_its_field_before_anything_is_streamed(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**GREEDY | fields, stream=stream)
    assert (raised.value.param, raised.value.code) == (param, code)
    assert raised.value.type == "invalid_request_error"


def test_a_model_that_nobody_serves_is_an_error_of_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**GREEDY | {"model": "nobody"})
    assert (raised.value.status_code, raised.value.code) in ((503, "no_worker"), (404, "model_not_found"))


def test_a_deadline_is_an_error_that_is_not_tried_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**GREEDY, extra_body={"timeout_ms": 0.001})
    assert raised.value.status_code == 504
    assert raised.value.response.headers["x-should-retry"] == "false"
