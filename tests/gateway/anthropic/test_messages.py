"""Bodies of Anthropic's API become wire requests, and errors have the names of their fields."""

import json
from typing import Any

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.anthropic import error_bodies
from tokenbus.gateway.anthropic.messages import ENDPOINT
from tokenbus.gateway.anthropic.turns import AnthropicFieldNames
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.serving.dialect import ParsedGeneration
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.messages import ReasoningOptions

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}


def body(**fields: object) -> bytes:
    return json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 9} | fields).encode()


def read(**fields: object) -> ParsedGeneration:
    return ENDPOINT.parse(body(**fields), {}, "r-1")


def refusal(**fields: object) -> errors.Error:
    """The error as the client is told of it."""
    error = refusal_of(lambda: read(**fields))
    message = error_bodies.message_of(http_errors.from_error(error))
    return codec.replace(error, param=AnthropicFieldNames().of(error.param or ""), message=message)


def test_every_field_becomes_that_of_the_wire() -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": 7,
        "cache_salt": "salt",
        "session_id": "session",
        "priority": 5,
        "timeout_ms": 500.0,
    }
    wanted = read(stop_sequences=["a", "b"], system="be brief", stream=True, **same)
    assert (wanted.model, wanted.stream, wanted.n) == ("demo", True, 1)
    assert wanted.requests[0] == messages.GenerateRequest(
        id="r-1",
        messages=[
            messages.ChatMessage(role="system", content="be brief"),
            messages.ChatMessage(role="user", content="hello"),
        ],
        max_tokens=9,
        stop=["a", "b"],
        return_progress=True,
        **same,  # type: ignore[arg-type]
    )


def test_the_longest_time_that_a_part_of_the_prompt_is_to_be_cached_counts_for_all_of_it() -> None:
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": "x"}
    tool = {"name": "f", "input_schema": SCHEMA}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text | {"cache_control": long}]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for fields, ttl_ms in (
        ({}, None),
        ({"cache_control": short}, 300_000),
        ({"system": [text | {"cache_control": long}]}, 3_600_000),
        ({"messages": [{"role": "user", "content": [text, text | {"cache_control": short}]}]}, 300_000),
        ({"tools": [tool | {"cache_control": short}], "cache_control": long}, 3_600_000),
        (
            {
                "tools": [tool],
                "messages": [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
            },
            3_600_000,
        ),
    ):
        control = read(**fields).requests[0].cache_control
        assert (None if control is None else control.ttl_ms) == ttl_ms, fields
    assert "ttl" in refusal(cache_control={"type": "ephemeral", "ttl": "2h"}).message


def test_a_whole_answer_is_streamed_on_the_wire_too_and_needs_no_progress() -> None:
    wanted = read()
    assert (wanted.stream, wanted.requests[0].stream, wanted.requests[0].return_progress) == (False, None, None)


def test_tools_that_the_client_runs_are_offered_and_those_of_anthropics_servers_skipped() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "f", "description": "does", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "g", "strict": True},
    ]
    assert read(tools=tools).requests[0].tools == [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "strict": True}},
    ]
    assert read(tools=tools[:1]).requests[0].tools is None


@pytest.mark.parametrize(
    ("choice", "theirs", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        ({"type": "none", "disable_parallel_tool_use": False}, "none", None),
        (None, None, None),
    ],
)
def test_tool_choices(choice: object, theirs: object, parallel: bool | None) -> None:
    request = read(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice=choice).requests[0]
    assert (request.tool_choice, request.parallel_tool_calls) == (theirs, parallel)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1_024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False, "x": None}},
            {"enable_thinking": False, "x": None},
        ),
    ],
)
def test_thinking_becomes_variables_of_the_template(fields: dict[str, object], arguments: object) -> None:
    assert read(**fields).requests[0].chat_template_kwargs == arguments


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, ReasoningOptions(max_tokens=50, optional=True)),
        ({"thinking": {"type": "disabled", "budget_tokens": 50}}, ReasoningOptions(effort="none")),
        ({"output_config": {"effort": "low"}}, ReasoningOptions(effort="low")),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9_999}, "output_config": {"effort": "low"}},
            ReasoningOptions(max_tokens=9_999, effort="low", optional=True),
        ),
    ],
)
def test_a_budget_for_thinking_is_a_hint(fields: dict[str, object], wanted: ReasoningOptions | None) -> None:
    assert read(**fields).requests[0].reasoning == wanted


def test_a_wrong_budget_for_thinking_is_refused_by_its_own_name() -> None:
    with pytest.raises(errors.RequestError) as refusal:
        read(thinking={"type": "enabled", "budget_tokens": -1})
    assert refusal.value.error.param == "thinking.budget_tokens"
    assert refusal.value.error.message.startswith("thinking.budget_tokens: must be at least 0")


def test_an_output_format_is_found_at_both_of_its_places() -> None:
    wanted = messages.ResponseFormat(type="json_schema", json_schema=messages.JsonSchema(schema=SCHEMA))
    form = {"type": "json_schema", "schema": SCHEMA}
    assert read(output_config={"effort": None, "format": form}).requests[0].response_format == wanted
    assert read(output_format=form).requests[0].response_format == wanted


def test_the_session_is_named_by_a_field_or_a_header() -> None:
    headers = {"x-claude-code-session-id": "s-1"}
    assert ENDPOINT.parse(body(), headers, "r").requests[0].session_id == "s-1"
    assert ENDPOINT.parse(body(session_id="s-2"), headers, "r").requests[0].session_id == "s-2"


def test_fields_that_nobody_knows_are_ignored() -> None:
    extra = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "container": [],
    }
    assert read(**extra).requests[0] == read().requests[0]


def test_what_a_model_or_client_has_written_stays_as_it_is_even_where_numbers_are_read_leniently() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None, "b": 1.0}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": None}
    conversation = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    form = {"type": "json_schema", "schema": SCHEMA}
    request = read(max_tokens=9.0, messages=conversation, output_config={"format": form}).requests[0]
    assert request.messages is not None
    assert request.messages[1].tool_calls is not None
    assert str(request.messages[1].tool_calls[0]["function"]["arguments"]) == "{'a': None, 'b': 1.0}"
    assert request.response_format is not None
    assert request.response_format.json_schema == messages.JsonSchema(schema=SCHEMA)


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"model": 5}, "model", "model: must be a string, got an integer"),
        ({"max_tokens": None}, "max_tokens", "max_tokens: is required"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens: must be at least 0"),
        ({"messages": None}, "messages", "messages: is required"),
        ({"messages": []}, "messages", "messages: at least one message is required"),
        (
            {"messages": [{"role": "poet", "content": "x"}]},
            "messages.0.role",
            "messages.0.role: must be 'assistant' or",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: is required"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "is required"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.1.content.0.text",
            "messages.1.content.0.text: must be a string, got an integer",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [CALL | {"name": ""}]}, *HELLO]},
            "messages.1.content.0.name",
            "messages.1.content.0.name: must be a string",
        ),
        (
            {
                "system": "x",
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}, CALL | {"input": nested(64)}]},
                    *HELLO,
                ],
            },
            "messages.1",
            "nested deeper than 64 levels",
        ),
        (
            {
                "system": "x",
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [CALL]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1"},
                            {"type": "tool_result", "tool_use_id": "c2"},
                        ],
                    },
                ],
            },
            "messages.2.content.1.tool_use_id",
            "messages.2.content.1.tool_use_id: no tool call before it has the id 'c2'",
        ),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "stop_sequences: at most 16"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences.1", "stop_sequences.1: must have 1 to 1024 bytes"),
        ({"temperature": -1}, "temperature", "temperature: must be at least 0"),
        ({"thinking": {"type": "much"}}, "thinking.type", "thinking.type: must be 'adaptive' or"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "a b"}]}, "tools.1.name", "must be 1 to"),
        (
            {"tools": [{"name": "f", "input_schema": nested(64)}]},
            "tools.0",
            "tools.0: is nested deeper than 64 levels",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice: there are no tools"),
        (
            {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
            "tool_choice.name: is not the name of one of the tools",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            "output_config.format.schema: is required",
        ),
        (
            {"output_config": {"format": {"type": "poem"}}},
            "output_config.format.type",
            "must be 'json_schema', got",
        ),
    ],
)
def test_what_is_wrong_names_the_field_as_the_client_called_it(
    fields: dict[str, object], param: str, problem: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, param)
    assert problem in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "messages.0.content.1.type",
        ),
        ({"messages": [*HELLO, {"role": "user", "content": [IMAGE]}]}, "messages.1.content.0.type"),
        (
            {
                "system": "x",
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}
                ],
            },
            "messages.0.content.0.content.0.type",
        ),
    ],
)
def test_what_is_not_served_is_unsupported(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (errors.Code.UNSUPPORTED, param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("given", [b"", b"[]", b"null", b'{"model": "demo"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(given: bytes) -> None:
    with pytest.raises(errors.RequestError) as raised:
        ENDPOINT.parse(given, {}, "r-1")
    assert raised.value.error.code is errors.Code.INVALID_REQUEST


def test_a_message_of_the_assistant_at_the_end_is_continued() -> None:
    assert read().requests[0].continue_final_message is None
    assert read(messages=[*HELLO, {"role": "assistant", "content": "{"}]).requests[0].continue_final_message is True


def test_a_call_at_the_end_can_not_be_continued() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    error = refusal(messages=[*HELLO, {"role": "assistant", "content": [call]}])
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, "messages.1")
