"""Bodies of OpenAI's API become wire requests, and errors have the names of their fields."""

import json

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import chat
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ParsedGeneration, ResponseHead
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.messages import ReasoningOptions

HELLO = [{"role": "user", "content": "hello"}]


def read(**fields: object) -> ParsedGeneration:
    return chat.ENDPOINT.parse(json.dumps({"model": "demo", "messages": HELLO, **fields}).encode(), {}, "r-1")


def refusal(**fields: object) -> errors.Error:
    return refusal_of(lambda: read(**fields))


def test_every_field_becomes_that_of_the_wire() -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 7,
        "stop": ["a", "b"],
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"5": 2.0},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "cache_salt": "salt",
        "session_id": "session",
        "timeout_ms": 500.0,
    }
    wanted = read(max_tokens=9, response_format={"type": "json_object"}, **same)
    assert wanted.model == "demo"
    assert wanted.requests[0] == messages.GenerateRequest(
        id="r-1",
        messages=[messages.ChatMessage(role="user", content="hello")],
        max_tokens=9,
        response_format=messages.ResponseFormat(type="json_object"),
        **same,  # type: ignore[arg-type]
    )


def test_mistral_s_word_for_a_required_call_is_known() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read(tools=tools, tool_choice="any").requests[0].tool_choice == "required"


def test_a_choice_of_a_function_needs_no_type() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chosen = read(tools=tools, tool_choice={"function": {"name": "f"}}).requests[0].tool_choice
    assert chosen == {"type": "function", "function": {"name": "f"}}
    with pytest.raises(errors.RequestError, match="not the name of one of the tools"):
        read(tools=tools, tool_choice={"function": {"name": "g"}})


@pytest.mark.parametrize(
    ("fields", "parallel"),
    [
        ({}, False),
        ({"parallel_tool_calls": True}, True),
        ({"tool_choice": "required"}, None),
        ({"tool_choice": "auto"}, None),
    ],
)
def test_a_function_that_is_named_is_called_once_unless_more_are_wanted(
    fields: dict[str, object], parallel: bool | None
) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    asked = read(**{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": named} | fields)
    assert asked.requests[0].parallel_tool_calls is parallel


def test_a_retention_of_the_cached_prompt_becomes_a_time() -> None:
    for retention, ttl_ms in (("in_memory", 300_000), ("in-memory", 300_000), ("24h", 86_400_000)):
        control = read(prompt_cache_retention=retention).requests[0].cache_control
        assert control is not None
        assert control.ttl_ms == ttl_ms
    assert read().requests[0].cache_control is None
    assert refusal(prompt_cache_retention="1y").param == "prompt_cache_retention"


def test_a_whole_answer_is_streamed_on_the_wire_too_so_that_a_worker_misses_a_dead_gateway() -> None:
    wanted = read(stream=False)
    assert wanted.stream is False
    assert wanted.requests[0].stream is None


def test_each_constraint_is_passed_on() -> None:
    for field, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "start: /a/")):
        assert getattr(read(**{field: value}).requests[0], field) == value


def test_usage_in_a_stream_is_an_option_of_the_stream() -> None:
    for options, is_shown in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        encoder = read(stream=True, **options).encoder(ResponseHead("r", 0, "demo"))
        for event in encoder.encode(0, AnswerEventReader().read(messages.Chunk(id="r", text="a"))):
            assert ("usage" in json.loads(event.removeprefix(b"data: "))) is is_shown


def test_fields_that_nobody_knows_are_ignored() -> None:
    extra = {"user": "me", "store": True, "metadata": {"a": "b"}, "nonsense": [[]]}
    assert read(**extra).requests == read().requests


def test_null_is_absent_and_an_integral_number_is_an_integer() -> None:
    assert read(stop=None, n=None, stream=None, max_tokens=5.0, seed=None).requests == read(max_tokens=5).requests


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert read(max_tokens=5, max_completion_tokens=6).requests[0].max_tokens == 6


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_logprobs_are_a_switch_and_their_number_a_field_of_its_own(
    fields: dict[str, object], logprobs: int | None
) -> None:
    assert read(**fields).requests[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"model": "m" * 129}, "model", "1 to 128 bytes"),
        ({"model": "x" * 129}, "model", "1 to 128 bytes"),
        ({"model": 5}, "model", "model: must be a string, got an integer"),
        ({"messages": None}, "messages", "is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "hello"}, "messages", "messages: must be an array, got a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role: is required"),
        ({"temperature": "hot"}, "temperature", "temperature: must be a number, got a string"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"max_tokens": True}, "max_tokens", "max_tokens: must be an integer, got a boolean"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens: must be at least 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: must be at least 0 and at most 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"n": 0}, "n", "must be 1 to 128"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", "prompt_cache_key: must have at most 256 bytes"),
        ({"prompt_cache_key": "x", "session_id": "x" * 257}, "session_id", "session_id: must have at most 256 bytes"),
        ({"n": 129}, "n", "must be 1 to 128"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"word": 1}}, "logit_bias", "token ids"),
        ({"response_format": {"type": "poem"}}, "response_format.type", "poem"),
        (
            {"stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "must be a boolean, got a string",
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
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_is_not_served_is_unsupported(fields: dict[str, object], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (errors.Code.UNSUPPORTED, param)


@pytest.mark.parametrize("num_leading", range(4))
def test_a_message_at_fault_has_its_place_in_the_clients_list(num_leading: int) -> None:
    system = [{"role": "system", "content": "be brief"}] * num_leading
    theirs = f"messages[{num_leading + 1}].content"
    error = refusal(messages=[*system, *HELLO, {"role": "user"}])
    assert (error.param, error.message) == (theirs, f"{theirs}: is required")
    of_wire = f"messages[{min(num_leading, 1) + 1}].content"
    parsed = read(messages=[*system, *HELLO, *HELLO])
    shown = parsed.named(http_errors.from_error(errors.invalid_field(of_wire, "too strange").error))
    assert (shown.param, shown.message) == (theirs, f"{theirs}: too strange")


def test_system_messages_that_were_joined_have_the_place_of_the_first() -> None:
    parsed = read(messages=[{"role": "system", "content": "be brief"}] * 2 + HELLO)
    assert parsed.named(http_errors.from_error(errors.invalid_field("messages[0]", "no").error)).param == "messages[0]"


def test_an_error_of_a_worker_names_the_field_as_the_client_called_it() -> None:
    refused = errors.invalid_field("max_tokens", "at most 5")
    shown = read(max_completion_tokens=6).named(http_errors.from_error(refused.error))
    assert (shown.param, shown.message) == ("max_completion_tokens", "max_completion_tokens: at most 5")
    assert read(max_tokens=6).named(http_errors.from_error(refused.error)).param == "max_tokens"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"model": "demo"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(errors.RequestError) as raised:
        chat.ENDPOINT.parse(body, {}, "r-1")
    assert raised.value.error.code is errors.Code.INVALID_REQUEST


def test_a_body_of_millions_of_lists_is_refused_before_it_is_decoded() -> None:
    body = b'{"model": "demo", "tools": [' + b"[]," * 600_000 + b"[]]}"
    with pytest.raises(errors.RequestError) as raised:
        chat.ENDPOINT.parse(body, {}, "r-1")
    assert raised.value.error.message == "the message has more than 524288 lists, objects and strings"


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_tools_may_nest_up_to_the_limit_of_the_wire_and_no_deeper() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert read(tools=[tool | {"deep": nested(63)}]).requests[0].tools
    assert refusal(tools=[tool | {"deep": nested(64)}]).param == "tools[0]"
    assert refusal(tools=[tool | {"deep": nested(900)}]).code is errors.Code.INVALID_REQUEST


def test_developer_is_system_and_leading_system_messages_are_one() -> None:
    parts = [{"type": "text", "text": "three"}]
    given = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": "two"},
        {"role": "system", "content": parts},
        {"role": "user", "content": "hello"},
        {"role": "developer", "content": "four"},
    ]
    conversation = read(messages=given).requests[0].messages
    assert conversation is not None
    assert [(one.role, one.content) for one in conversation] == [
        ("system", "one\n\ntwo\n\nthree"),
        ("user", "hello"),
        ("system", "four"),
    ]


def test_reasoning_in_the_history_has_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": "x", name: "because"}
        conversation = read(messages=[*HELLO, said, *HELLO]).requests[0].messages
        assert conversation is not None
        assert conversation[1] == messages.ChatMessage(role="assistant", content="x", reasoning_content="because")


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "minimal"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_a_reasoning_effort_becomes_arguments_of_the_template(
    fields: dict[str, object], arguments: dict[str, object] | None
) -> None:
    assert read(**fields).requests[0].chat_template_kwargs == arguments


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, ReasoningOptions(effort="low")),
        ({"reasoning": {"effort": "high"}}, ReasoningOptions(effort="high")),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, ReasoningOptions(effort="low")),
        ({"reasoning": {"enabled": False}}, ReasoningOptions(effort="none")),
        ({"reasoning": {"enabled": True, "exclude": False}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ReasoningOptions(max_tokens=5, optional=True)),
        (
            {"thinking": {"budget_tokens": 5}, "reasoning": {"max_tokens": 9}},
            ReasoningOptions(max_tokens=9, optional=True),
        ),
        ({"reasoning": {"max_tokens": 0}}, ReasoningOptions(max_tokens=0, optional=True)),
        (
            {"reasoning": {"max_tokens": 9, "effort": "low"}, "thinking_token_budget": 5},
            ReasoningOptions(max_tokens=9, effort="low", optional=True),
        ),
        ({"thinking_token_budget": 5}, ReasoningOptions(max_tokens=5)),
        ({"reasoning_budget_tokens": 6}, ReasoningOptions(max_tokens=6, optional=True)),
        ({"thinking_budget_tokens": 7}, ReasoningOptions(max_tokens=7, optional=True)),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_budget_tokens": -1, "reasoning_effort": "low"}, ReasoningOptions(effort="low")),
    ],
)
def test_a_budget_for_reasoning_has_the_names_of_all_servers(
    fields: dict[str, object], wanted: ReasoningOptions | None
) -> None:
    assert read(**fields).requests[0].reasoning == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"thinking_budget_tokens": 2**31}, "thinking_budget_tokens"),
        ({"thinking_token_budget": "9"}, "thinking_token_budget"),
        ({"reasoning": {"effort": "e" * 65}}, "reasoning.effort"),
        ({"reasoning_effort": "e" * 65}, "reasoning_effort"),
    ],
)
def test_a_wrong_budget_is_refused_by_its_own_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(errors.RequestError) as refusal:
        read(**fields)
    assert refusal.value.error.param == param
    assert refusal.value.error.message.startswith(param)


def test_a_session_is_named_by_a_field_or_a_header() -> None:
    def session(headers: dict[str, str], **fields: object) -> str | None:
        body = json.dumps({"model": "demo", "messages": HELLO, **fields}).encode()
        return chat.ENDPOINT.parse(body, headers, "r-1").requests[0].session_id

    assert session({}) is None
    assert session({"x-session-id": "s" * 257}) is None
    for name in ("x-claude-code-session-id", "session-id", "x-session-id"):
        assert session({name: "s"}) == "s"
    assert session({"session-id": "s"}, prompt_cache_key="k") == "k"
    assert session({"session-id": "s"}, prompt_cache_key="k", session_id="own") == "own"


def test_a_service_tier_is_a_priority_unless_there_is_one() -> None:
    assert [read(service_tier=tier).requests[0].priority for tier in ("auto", "priority", "flex")] == [None, -100, 100]
    assert read(service_tier="flex", priority=3).requests[0].priority == 3


SAID = [*HELLO, {"role": "assistant", "content": "The"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": SAID, "continue_final_message": True},
        {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [*HELLO, {**SAID[-1], "prefix": True}]},
    ],
    ids=["vLLM's", "vLLM's, whole", "Mistral's"],
)
def test_the_last_message_is_continued_if_the_body_asks_for_it(fields: dict[str, object]) -> None:
    (request,) = read(**fields).requests
    assert request.continue_final_message is True
    assert request.messages is not None
    assert request.messages[-1] == messages.ChatMessage(role="assistant", content="The")


def test_without_that_the_answer_begins_a_message() -> None:
    assert read(messages=SAID).requests[0].continue_final_message is None
    assert read(messages=SAID, continue_final_message=False, add_generation_prompt=True).requests


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"add_generation_prompt": False}, errors.Code.UNSUPPORTED, "add_generation_prompt"),
        (
            {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True},
            errors.Code.INVALID_REQUEST,
            "add_generation_prompt",
        ),
        ({"continue_final_message": True}, errors.Code.INVALID_REQUEST, "messages[0].role"),
        (
            {"messages": [{**SAID[-1], "prefix": True}, *HELLO]},
            errors.Code.INVALID_REQUEST,
            "messages[0].prefix",
        ),
    ],
)
def test_only_the_last_message_is_continued_and_no_other_begun(
    fields: dict[str, object], code: errors.Code, param: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (code, param)
