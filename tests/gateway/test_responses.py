"""The Responses API as OpenAI's own client library sees it, which checks the type of every field."""

import json
from typing import Any

import openai
import pytest

ANSWER = "The capital of Avaria is Limora."
GREEDY: dict[str, Any] = {"model": "demo", "input": "What is the capital of Avaria?", "temperature": 0}
TOO_LONG: dict[str, Any] = GREEDY | {"input": "word " * 9_000}


def test_a_whole_response(client: openai.OpenAI) -> None:
    response = client.responses.create(**GREEDY)
    assert (response.output_text, response.status) == (ANSWER, "completed")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_that_the_librarys_helper_puts_together(client: openai.OpenAI) -> None:
    with client.responses.stream(**GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_asynchronous_client_streams(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.responses.stream(**GREEDY) as stream:
        assert (await stream.get_final_response()).output_text == ANSWER


def test_a_conversation_is_sent_whole_each_time(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": GREEDY["input"]}
    first = client.responses.create(**GREEDY | {"input": [question]})
    sum_asked: Any = {"role": "user", "content": [{"type": "input_text", "text": "What is 12 + 30?"}]}
    said: Any = [item.to_dict() for item in first.output]
    second = client.responses.create(**GREEDY | {"input": [question, *said, sum_asked]}, store=False)
    assert "42" in second.output_text


def test_a_stored_response_is_continued_shown_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY)
    second = client.responses.create(**GREEDY | {"input": "What is 12 + 30?"}, previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert "42" in second.output_text
    known = first.usage.input_tokens + first.usage.output_tokens - 1  # the last token was sampled, and not computed
    assert second.usage.input_tokens_details.cached_tokens >= known
    assert client.responses.retrieve(second.id).output == second.output
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in listed] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**GREEDY, previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    third = client.responses.create(**GREEDY, previous_response_id=second.id)  # which has what the first one had
    assert third.output_text == ANSWER


def test_a_stream_is_stored_before_it_ends(client: openai.OpenAI) -> None:
    with client.responses.stream(**GREEDY) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == ANSWER


@pytest.mark.parametrize("path", ["responses/compact", "responses/resp_1/cancel"])
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(path, body={}, cast_to=object)
    assert refused.value.code == "unsupported"


def test_a_text_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Limora", "Paris"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    wanted: Any = {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}}
    value = json.loads(client.responses.create(**GREEDY, text=wanted).output_text)
    assert value["capital"] in ("Limora", "Paris")
    assert isinstance(value["sure"], bool)


def test_a_response_that_reaches_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(**GREEDY, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(**GREEDY, top_logprobs=2, include=["message.output_text.logprobs"])
    (item,) = response.output
    assert item.type == "message"
    (text,) = item.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert "".join(one.token for one in text.logprobs) == ANSWER
    assert all(len(one.top_logprobs) == 2 for one in text.logprobs)


def test_a_conversation_that_is_too_long_is_an_error_of_status_or_the_last_event_of_a_stream(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**TOO_LONG)
    assert raised.value.code == "context_length_exceeded"
    with client.responses.with_streaming_response.create(**TOO_LONG, stream=True) as raw:
        *_, last = (json.loads(line.removeprefix("data: ")) for line in raw.iter_lines() if line.startswith("data: "))
    assert (raw.status_code, last["type"], last["response"]["status"]) == (200, "response.failed", "failed")
    assert last["response"]["error"]["code"] == "context_length_exceeded"
    assert last["response"]["error"]["message"].startswith("This model's maximum context length is ")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "poem"}}}},
            "text.format.schema",
            "invalid_request",
        ),
        ({"input": [{"role": "poet", "content": "x"}]}, "input", "invalid_request"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
            "invalid_request",
        ),
    ],
)
def test_a_bad_request_names_its_field_before_anything_is_streamed(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**GREEDY | fields, stream=stream)
    assert (raised.value.param, raised.value.code) == (param, code)
    assert raised.value.type == "invalid_request_error"
