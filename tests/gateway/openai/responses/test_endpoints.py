"""Bodies of the Responses API become wire requests, and errors have the names of their fields."""

import json
from typing import Any

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import error_bodies
from tokenbus.gateway.openai.fields import CommonFields
from tokenbus.gateway.openai.responses.endpoints import ENDPOINT
from tokenbus.gateway.serving.dialect import ParsedGeneration
from tokenbus.protocol.prompt import history
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.messages import ReasoningOptions

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}


def read(headers: dict[str, str] | None = None, **fields: object) -> ParsedGeneration:
    body = {"model": "demo", "input": "hello", **fields}
    return ENDPOINT.parse(json.dumps(body).encode(), headers or {}, "r-1")


def refusal(**fields: object) -> errors.Error:
    return refusal_of(lambda: read(**fields))


def test_every_field_becomes_that_of_the_wire() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "parallel_tool_calls": False,
        "seed": 7,
        "stop": ["a", "b"],
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"5": 2.0},
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "regex": None,
        "choice": None,
        "grammar": None,
        "cache_salt": "salt",
        "timeout_ms": 500.0,
        "ignore_eos": False,
        "min_tokens": 2,
        "stop_token_ids": [5],
    }
    common = CommonFields().to_wire(None).fields
    assert same.keys() | {"session_id", "priority"} == common.keys() - {"cache_control"} | {"parallel_tool_calls"}
    wanted = read(max_output_tokens=9, session_id="session", priority=3, **same)
    assert (wanted.model, wanted.n, wanted.stream) == ("demo", 1, False)
    assert wanted.requests[0] == messages.GenerateRequest(
        id="r-1",
        messages=[messages.ChatMessage(role="user", content="hello")],
        max_tokens=9,
        session_id="session",
        priority=3,
        **same,
    )


def test_instructions_are_the_first_system_message_with_which_those_that_follow_are_joined() -> None:
    asked = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert read(instructions="be brief", input=asked).requests[0].messages == [
        messages.ChatMessage(role="system", content="be brief\n\nbe kind"),
        messages.ChatMessage(role="user", content="hi"),
    ]


@pytest.mark.parametrize("status", [None, "in_progress", "incomplete"])
def test_the_answer_continues_a_last_text_of_the_assistant_that_is_not_complete(status: str | None) -> None:
    begun = {"type": "message", "role": "assistant", "status": status, "content": "The capital is"}
    asked = {"role": "user", "content": "hi"}
    wanted = read(input=[asked, begun])
    assert wanted.requests[0].continue_final_message is True
    assert wanted.name_of("continue_final_message") == "input[1]"
    offer = {"type": "additional_tools", "tools": [TOOL]}
    for items in ([asked, begun | {"status": "completed"}], [asked, begun, offer], [asked, begun, asked]):
        assert read(input=items).requests[0].continue_final_message is None
    for items in ([asked, begun | {"content": ""}], [asked, CALL, begun], [begun, CALL], []):
        assert read(input=items or "").requests[0].continue_final_message is None


@pytest.mark.parametrize("fields", [{"input": None}, {"input": ""}])
def test_an_input_that_is_left_out_is_an_empty_text(fields: dict[str, Any]) -> None:
    assert read(**fields).requests[0].messages == [messages.ChatMessage(role="user", content="")]


def test_the_format_of_the_text_is_the_response_format() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = read(text={"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}})
    assert wanted.requests[0].response_format == messages.ResponseFormat(
        type="json_schema", json_schema=messages.JsonSchema(schema=schema, strict=True)
    )
    assert read(text={"format": {"type": "json_object"}}).requests[0].response_format == messages.ResponseFormat(
        type="json_object"
    )
    assert read(text={"verbosity": "low"}).requests[0].response_format is None


def test_nulls_within_a_schema_stay_even_if_the_body_needs_a_lenient_reading() -> None:
    schema = {"enum": [None, 1.0], "default": None}
    wanted = read(text={"format": {"type": "json_schema", "name": "n", "schema": schema}}, max_output_tokens=5.0)
    assert wanted.requests[0].response_format is not None
    assert wanted.requests[0].response_format.json_schema == messages.JsonSchema(schema=schema)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 2}, 2),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_asked_for_by_their_number_or_by_an_inclusion(
    fields: dict[str, object], logprobs: int | None
) -> None:
    assert read(**fields).requests[0].logprobs == logprobs


def test_an_effort_sets_variables_of_the_template() -> None:
    assert read(reasoning={"effort": "low"}).requests[0].chat_template_kwargs == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }
    assert read(reasoning={"effort": "none"}).requests[0].chat_template_kwargs == {"enable_thinking": False}
    assert read(reasoning={"summary": "auto"}).requests[0].chat_template_kwargs is None
    assert read(reasoning={"effort": "low"}).requests[0].reasoning == ReasoningOptions(effort="low")
    assert read(reasoning={"max_tokens": 9}).requests[0].reasoning == ReasoningOptions(max_tokens=9, optional=True)
    assert read(thinking_token_budget=9).requests[0].reasoning == ReasoningOptions(max_tokens=9)


@pytest.mark.parametrize(("tier", "priority"), [("priority", -100), ("fast", -100), ("flex", 100), ("auto", None)])
def test_a_service_tier_is_a_priority(tier: str, priority: int | None) -> None:
    assert read(service_tier=tier).requests[0].priority == priority


def test_a_session_is_named_by_our_field_or_the_cache_key_or_a_header() -> None:
    header = {"session-id": "header"}
    assert read(header).requests[0].session_id == "header"
    assert read(header, prompt_cache_key="key").requests[0].session_id == "key"
    assert read(header, prompt_cache_key="key", session_id="ours").requests[0].session_id == "ours"


def test_fields_that_change_nothing_here_are_ignored() -> None:
    ignored = {
        "store": False,
        "user": "me",
        "safety_identifier": "me",
        "truncation": "auto",
        "stream_options": {"include_obfuscation": True},
        "background": False,
        "previous_response_id": None,
        "max_tool_calls": 3,
        "client_metadata": {"a": [1]},
        "include": ["file_search_call.results"],
    }
    assert read(**ignored).requests[0] == read().requests[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ],
)
def test_what_is_not_served_is_unsupported(fields: dict[str, object], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (errors.Code.UNSUPPORTED, param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "input: must be a string or an array, got an integer"),
        (
            {"input": [{"role": "user", "content": 5}]},
            "input[0].content",
            "must be a string or an array, got an integer",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role", "must not be empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "required"),
        ({"input": [CALL, RESULT | {"output": None}]}, "input[1].output", "is required"),
        ({"max_output_tokens": -1}, "max_output_tokens", "must be at least 0"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", "at most 256 bytes"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type", "poem"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is required"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "at most one of"),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools[2].name", "earlier tool"),
        ({"tools": [{"type": "custom", "name": ""}]}, "tools[0].name", "must be 1 to 128"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "must be 1 to 128"),
        ({"tools": [TOOL | {"parameters": []}]}, "tools[0].parameters", "must be an object"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "must be a string"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "must be a list"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL | {"name": "é"}]}]},
            "tools[0].tools[1].name",
            "must be 1 to 128",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "must be auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "is not the name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "must name a function"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "a list"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ],
)
def test_what_is_wrong_names_the_field_as_the_client_called_it(
    fields: dict[str, object], param: str, problem: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, param)
    assert problem in error.message
    assert param in error.message


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([CALL | {"arguments": "[]"}], "input[1].arguments"),
        ([{"role": "assistant", "content": "so"}, CALL, CALL | {"name": None}], "input[3].name"),
        ([CALL | {"call_id": ""}], "input[1].call_id"),
        ([RESULT], "input[1].call_id"),
    ],
)
def test_mistakes_that_a_router_finds_in_past_calls_get_the_names_of_their_items(
    items: list[dict[str, Any]], param: str
) -> None:
    parsed = read(instructions="be brief", input=[{"role": "developer", "content": "be kind"}, *items])
    with pytest.raises(errors.RequestError) as raised:
        history.message_dicts(parsed.requests[0].messages or [])
    body = json.loads(error_bodies.encode(parsed.named(http_errors.from_error(raised.value.error))))
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(f"{param}: ")


def test_a_schema_that_a_worker_can_not_compile_gets_its_name() -> None:
    refused = errors.invalid_field("response_format.json_schema.schema", "unknown type")
    body = json.loads(error_bodies.encode(read().named(http_errors.from_error(refused.error))))
    assert (body["error"]["param"], body["error"]["message"]) == (
        "text.format.schema",
        "text.format.schema: unknown type",
    )


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": "demo"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(errors.RequestError) as raised:
        ENDPOINT.parse(body, {}, "r-1")
    assert raised.value.error.code is errors.Code.INVALID_REQUEST
