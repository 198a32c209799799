"""The body of a whole response."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from tokenbus.gateway.openai.responses.endpoints import ENDPOINT
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.protocol.wire import messages

USAGE = messages.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=4)


def whole(reason: messages.FinishReason = messages.FinishReason.STOP, said: str = "a", **fields: object) -> Any:
    reader = AnswerEventReader()
    reader.read(messages.Chunk(id="r", text=said, finish_reason=reason, usage=USAGE))
    body = json.dumps({"model": "demo", "input": "hi", **fields}).encode()
    encoded = ENDPOINT.parse(body, {}, "r").encoder(ResponseHead("r", 1_700_000_000, "demo")).whole([reader])
    Response.model_validate_json(encoded, strict=True)
    return json.loads(encoded)


def test_a_response_has_every_field_that_clients_expect() -> None:
    assert whole() == {
        "id": "resp_r",
        "object": "response",
        "created_at": 1_700_000_000,
        "completed_at": 1_700_000_000,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "frequency_penalty": 0.0,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "demo",
        "output": [
            {
                "type": "message",
                "id": "msg_r_0",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 0.7,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 8,
        },
        "user": None,
    }


def test_a_response_repeats_what_was_asked_for_and_done() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "a": None}, "strict": True}
    same: dict[str, Any] = {
        "instructions": "be brief",
        "frequency_penalty": 0.5,
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "presence_penalty": -0.5,
        "prompt_cache_key": "key",
        "safety_identifier": "me",
        "user": "me",
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": "flex",
        "temperature": 0.5,
        "text": {
            "format": {
                "type": "json_schema",
                "name": "n",
                "description": None,
                "schema": {"type": "object"},
                "strict": False,
            },
            "verbosity": "low",
        },
        "tool_choice": {"type": "function", "name": "f"},
        "top_logprobs": 2,
        "top_p": 0.25,
    }
    response = whole(**same, tools=[{"type": "web_search"}, tool])
    assert {key: response[key] for key in same} == same
    assert response["tools"] == [tool | {"description": None}]
    assert whole(tools=[{"type": "function", "name": "f"}])["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    ]


def test_what_is_not_done_as_asked_is_told() -> None:
    response = whole(truncation="auto", service_tier="fast")
    assert (response["store"], response["truncation"], response["service_tier"]) == (False, "disabled", "priority")


@pytest.mark.parametrize("text", ["", "a"])
def test_a_response_that_reached_its_limit_is_incomplete(text: str) -> None:
    response = whole(messages.FinishReason.LENGTH, text)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == (["incomplete"] if text else [])
