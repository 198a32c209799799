"""Every field of a request is held to its range, and a refusal names the field."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import errors, internal, limits
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.checks.validation import RequiredFeature
from tokenbus.protocol.wire.errors import Code
from tokenbus.protocol.wire.messages import (
    ChatMessage,
    ContentPart,
    GenerateRequest,
    JsonSchema,
    Lora,
    ReasoningOptions,
    ResponseFormat,
    ResumeFrom,
    RoutingOptions,
    TokenizeRequest,
)
from tokenbus.protocol.wire.params import CacheControl, GenerationParams, ranges_of

PROMPT: dict[str, object] = {"prompt": "hello"}
RANGES = ranges_of(GenerateRequest)


def make(**fields: object) -> GenerateRequest:
    """A request with the prompt `hello`, unless the fields say another."""
    prompted = {"messages", "prompt", "token_ids"} & set(fields)
    return GenerateRequest(**(fields if prompted else PROMPT | fields))  # type: ignore[arg-type]


def refusal(asked: GenerateRequest) -> errors.Error:
    with pytest.raises(errors.RequestError) as caught:
        validation.check_request(asked)
    return caught.value.error


def chat(**fields: object) -> GenerateRequest:
    return make(messages=[ChatMessage(**({"role": "user"} | fields))])  # type: ignore[arg-type]


def tool(**schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | schema}}


USER: list[Any] = [ChatMessage(role="user", content="hi")]
CHOICE = {"type": "function", "function": {"name": "f"}}
PASSED_ON: dict[str, Callable[[dict[str, object]], GenerateRequest]] = {
    "response_format.json_schema.schema": lambda value: make(response_format=json_schema(**value)),
    "tools[0]": lambda value: make(messages=USER, tools=[tool(**value)]),
    "tool_choice": lambda value: make(messages=USER, tools=[tool()], tool_choice=CHOICE | value),
    "chat_template_kwargs": lambda value: make(messages=USER, chat_template_kwargs=value),
    "messages[0].tool_calls": lambda value: chat(role="assistant", tool_calls=[value]),
}
"""Requests with a value that is passed on as it is, by the name of its field."""


# Ranges


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 0, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("temperature", 0, 100),
        ("top_p", 5e-324, 1),
        ("top_k", 0, 2**31 - 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 10),
        ("repetition_last_n", 0, 2**31 - 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("seed", 0, 2**32 - 1),
        ("logprobs", 0, 20),
        ("priority", -1_000, 1_000),
        ("timeout_ms", 5e-324, 1e12),
    ],
)
def test_a_number_may_be_at_each_end_of_its_range_and_not_one_step_past_it(name: str, low: float, high: float) -> None:
    def next_to(value: float, towards: float) -> float:
        if name in {"max_tokens", "min_tokens", "top_k", "repetition_last_n", "seed", "logprobs", "priority"}:
            return value + (1 if towards > 0 else -1)
        return math.nextafter(value, towards)

    validation.check_request(make(**{name: low}))
    validation.check_request(make(**{name: high}))
    for value in (next_to(low, -math.inf), next_to(high, math.inf)):
        error = refusal(make(**{name: value}))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, name)
        assert error.message.startswith(f"{name}: must be ")


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_no_range_holds_what_is_not_a_number_or_beyond_all_of_them(name: str, value: float) -> None:
    assert refusal(make(**{name: value})).param == name


def test_a_range_says_what_it_holds() -> None:
    assert refusal(make(top_p=0)).message == "top_p: must be above 0 and at most 1, got 0"
    assert refusal(make(logprobs=21)).message == "logprobs: must be at least 0 and at most 20, got 21"


# The prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "token_ids": [1]}, "token_ids"),
        ({"messages": [ChatMessage(role="user", content="a")], "prompt": "a"}, "prompt"),
        ({"messages": [ChatMessage(role="user", content="a")], "token_ids": [1]}, "token_ids"),
        ({"messages": [ChatMessage(role="user", content="a")], "prompt": "a", "token_ids": [1]}, "token_ids"),
        ({"prompt": "", "token_ids": []}, "token_ids"),
    ],
)
def test_a_second_prompt_is_refused(fields: dict[str, object], param: str) -> None:
    error = refusal(GenerateRequest(**fields))  # type: ignore[arg-type]
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert "exactly one of" in error.message
    assert all(name in error.message for name in fields)


@pytest.mark.parametrize("fields", [{"token_ids": [1]}, {"messages": [ChatMessage(role="user", content="x")]}])
def test_only_a_text_has_a_gap_to_fill(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError) as refused:
        validation.check_request(GenerateRequest(suffix="x", **fields))
    assert refused.value.error.param == "suffix"
    validation.check_request(GenerateRequest(suffix="", **fields))


def test_no_prompt_at_all_is_refused() -> None:
    error = refusal(GenerateRequest())
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "prompt")
    assert "none of them" in error.message


@pytest.mark.parametrize(("name", "empty"), [("messages", []), ("prompt", ""), ("token_ids", [])])
def test_an_empty_prompt_is_refused(name: str, empty: object) -> None:
    error = refusal(make(**{name: empty}))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, name)


@pytest.mark.parametrize("name", ["token_ids", "stop_token_ids"])
def test_token_ids_use_all_32_bits_and_not_one_more(name: str) -> None:
    others = {} if name == "token_ids" else PROMPT
    validation.check_request(make(**others, **{name: [0, limits.MAX_TOKEN_ID]}))
    for wrong in (-1, limits.MAX_TOKEN_ID + 1, 2**64, 10**400):
        error = refusal(make(**others, **{name: [0, 1, wrong, -5]}))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, f"{name}[2]")


def test_a_checked_prompt_of_token_ids_is_packed_and_one_that_is_packed_must_be_whole() -> None:
    packed = b"\1\0\0\0\xff\xff\xff\xff"
    assert validation.check_request(make(token_ids=[1, limits.MAX_TOKEN_ID])).token_ids == packed
    assert validation.check_request(make(token_ids=packed)).token_ids is packed
    for wrong in (packed[:-1], b"1"):
        error = refusal(make(token_ids=wrong))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, "token_ids")
    assert refusal(make(token_ids=b"")).param == "token_ids"


def test_fields_of_all_kinds_are_checked_alone_and_together() -> None:
    """Those that are absent are not looked at, which must not hide one that is given."""
    wrong = {
        "max_tokens": -1,
        "stop_token_ids": [-1],
        "stop": "",
        "logit_bias": {"x": 1.0},
        "choice": [""],
        "tool_choice": "required",
        "tools": [{}],
        "lora": [Lora(name="a", scale=9.0)],
        "session_id": "x" * 300,
        "cache_control": CacheControl(ttl_ms=-1.0),
        "suffix": "x",
        "timeout_ms": 0.0,
    }
    for name, value in wrong.items():
        found = refusal(make(token_ids=[1], **{name: value})).param
        assert found is not None, name
        assert found.startswith(name), (name, found)
        together = refusal(make(token_ids=[1], temperature=0.5, seed=1, **{name: value})).param
        assert together == found


def test_a_conversation_has_as_many_messages_as_the_limit_and_not_one_more() -> None:
    turn = ChatMessage(role="user", content="a")
    validation.check_request(make(messages=[turn] * limits.MAX_MESSAGES))
    error = refusal(make(messages=[turn] * (limits.MAX_MESSAGES + 1)))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "messages")


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="user", content=""),
        ChatMessage(role="user", content=[]),
        ChatMessage(role="user", content=[ContentPart(type="text", text="")]),
        ChatMessage(role="a role of its own", content="a"),
        ChatMessage(role="assistant", tool_calls=[{"id": "1"}]),
        ChatMessage(role="tool", content="42", name="adder", tool_call_id="1"),
    ],
)
def test_these_messages_are_taken(message: ChatMessage) -> None:
    validation.check_request(make(messages=[message]))


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (ChatMessage(role="user"), Code.INVALID_REQUEST, "content"),
        (ChatMessage(role="assistant", tool_calls=[]), Code.INVALID_REQUEST, "content"),
        (ChatMessage(role="", content="a"), Code.INVALID_REQUEST, "role"),
        (ChatMessage(role="user", content=[ContentPart(type="text")]), Code.INVALID_REQUEST, "content[0].text"),
        (
            ChatMessage(role="user", content=[ContentPart(type="text", text="a"), ContentPart(type="image_url")]),
            Code.UNSUPPORTED,
            "content[1].type",
        ),
    ],
)
def test_a_wrong_message_is_refused_at_its_place(message: ChatMessage, code: Code, param: str) -> None:
    error = refusal(make(messages=[ChatMessage(role="system", content="a"), message]))
    assert (error.code, error.param) == (code, f"messages[1].{param}")


# Stops, hints, ids


@pytest.mark.parametrize("size", [1, limits.MAX_STOP_BYTES])
def test_a_stop_string_may_have_1_to_1024_bytes(size: int) -> None:
    validation.check_request(make(stop="x" * size))
    validation.check_request(make(stop=["y", "x" * size]))


@pytest.mark.parametrize("stop", ["", "x" * (limits.MAX_STOP_BYTES + 1), "é" * (limits.MAX_STOP_BYTES // 2) + "x"])
def test_a_stop_string_of_no_bytes_or_too_many_is_refused(stop: str) -> None:
    assert refusal(make(stop=stop)).param == "stop"
    assert refusal(make(stop=["y", stop])).param == "stop[1]"


def test_there_may_be_16_stop_strings_and_not_17() -> None:
    validation.check_request(make(stop=[]))
    validation.check_request(make(stop=["x"] * 16))
    error = refusal(make(stop=["x"] * 17))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "stop")


def test_there_may_be_as_many_stop_token_ids_as_the_limit_and_not_one_more() -> None:
    validation.check_request(make(stop_token_ids=[1] * limits.MAX_STOP_TOKEN_IDS))
    error = refusal(make(stop_token_ids=[1] * (limits.MAX_STOP_TOKEN_IDS + 1)))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "stop_token_ids")


@pytest.mark.parametrize("name", ["cache_salt", "session_id"])
def test_salt_and_session_have_as_many_bytes_as_the_limit_and_not_one_more(name: str) -> None:
    longest = "é" * (limits.MAX_SALT_BYTES // 2)
    validation.check_request(make(**{name: longest}))
    validation.check_request(make(**{name: ""}))
    error = refusal(make(**{name: longest + "x"}))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, name)


@pytest.mark.parametrize("request_id", ["a", "A-Za-z0-9_-", "-", "x" * limits.MAX_ID_BYTES])
def test_these_ids_are_taken(request_id: str) -> None:
    validation.check_request(make(id=request_id))
    validation.check_id(request_id)


@pytest.mark.parametrize(
    "request_id",
    ["", "x" * (limits.MAX_ID_BYTES + 1), "a.b", "a b", "a\n", "\na", "*", ">", "a:b", "a=2E", "é", "\u0661", "a/b"],
)
def test_an_id_that_can_not_be_part_of_a_subject_is_refused(request_id: str) -> None:
    error = refusal(make(id=request_id))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "id")
    with pytest.raises(errors.RequestError):
        validation.check_id(request_id)


def test_a_request_without_an_id_is_taken() -> None:
    validation.check_id(None)


def nested(levels: int) -> dict[str, object]:
    value: dict[str, object] = {"a": 1}
    for _ in range(levels - 2):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("name", "wrap"),
    [("chat_template_kwargs", 0), ("tool_calls", 1)],
)
def test_free_form_fields_nest_to_the_limit_and_not_one_level_deeper(name: str, wrap: int) -> None:
    def asked(levels: int) -> GenerateRequest:
        value = nested(levels - wrap)
        field = {name: [value] if wrap else value}
        return chat(**field) if name == "tool_calls" else make(**field)

    validation.check_request(asked(limits.MAX_NESTING))
    error = refusal(asked(limits.MAX_NESTING + 1))
    assert error.code is Code.INVALID_REQUEST
    assert error.param == ("messages[0].tool_calls" if name == "tool_calls" else name)


def test_a_schema_nests_to_the_limit_and_not_one_level_deeper() -> None:
    def asked(levels: int) -> GenerateRequest:
        return make(response_format=ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=nested(levels))))

    validation.check_request(asked(limits.MAX_NESTING))
    assert refusal(asked(limits.MAX_NESTING + 1)).param == "response_format.json_schema.schema"


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1])
def test_a_value_that_is_passed_on_holds_integers_of_64_bits_and_no_larger_ones(number: int) -> None:
    beyond = number + (1 if number > 0 else -1)
    for path, asked in PASSED_ON.items():
        validation.check_request(asked({"a": [1.5, {"b": number}]}))
        assert refusal(asked({"a": [1.5, {"b": beyond}]})).param == path


@pytest.mark.parametrize(
    "make_arguments",
    [
        lambda number: {f"k{index}": 1 for index in range(number)},
        lambda number: {"a": [1] * (number - 1)},
        lambda number: {"a": {f"k{index}": [] for index in range(number - 1)}},
        lambda number: {"a": [[1]] * ((number - 1) // 2), "b": 1},
    ],
    ids=["names", "items", "members", "nested items"],
)
def test_template_arguments_have_up_to_so_many_values(make_arguments: Callable[[int], dict[str, Any]]) -> None:
    fits, exceeds = make_arguments(limits.MAX_TEMPLATE_VALUES), make_arguments(limits.MAX_TEMPLATE_VALUES + 2)
    talk = [ChatMessage(role="user", content="hi")]
    validation.check_request(make(messages=talk, chat_template_kwargs=fits))
    validation.check_tokenize_request(TokenizeRequest(messages=talk, chat_template_kwargs=fits))
    error = refusal(make(messages=talk, chat_template_kwargs=exceeds))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "chat_template_kwargs")
    assert error.message == "chat_template_kwargs: must have at most 20000 names, members and items in all"
    with pytest.raises(errors.RequestError, match="names, members and items"):
        validation.check_tokenize_request(TokenizeRequest(messages=talk, chat_template_kwargs=exceeds))


def test_a_schema_or_tool_with_keys_that_json_has_not_is_refused() -> None:
    for path in ("response_format.json_schema.schema", "tools[0].function"):
        error = refusal(PASSED_ON[path.removesuffix(".function")]({"a": {(1,): 1}}))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, path)
        assert error.message.startswith(f"{path}: must be JSON")


# What it needs


@pytest.mark.parametrize(
    ("field", "value", "feature", "param"),
    [
        ("logprobs", 0, "logprobs", "logprobs"),
        ("logprobs", 20, "logprobs", "logprobs"),
        ("repetition_penalty", 1.1, "penalties", "repetition_penalty"),
        ("presence_penalty", -0.5, "penalties", "presence_penalty"),
        ("frequency_penalty", 0.5, "penalties", "frequency_penalty"),
        ("logit_bias", {"1": 0.0, "2": -1.0}, "logit_bias", "logit_bias"),
        ("response_format", ResponseFormat(type="json_object"), "structured_output", "response_format"),
        (
            "response_format",
            ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={})),
            "structured_output",
            "response_format",
        ),
        ("grammar", 'root ::= "a"', "grammar", "grammar"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools", "tools"),
        ("suffix", "x", "fim", "suffix"),
        ("resume_from", ResumeFrom(token_ids=[1]), "resume", "resume_from"),
        ("return_progress", True, "progress", "return_progress"),
        ("reasoning", ReasoningOptions(max_tokens=0), "reasoning_budget", "reasoning.max_tokens"),
        ("routing", RoutingOptions(explain=True), "explain", "routing.explain"),
    ],
)
def test_a_value_that_changes_something_needs_a_feature(field: str, value: object, feature: str, param: str) -> None:
    assert list(validation.required_features(make(**{field: value}))) == [RequiredFeature(feature, param)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.0),
        ("repetition_last_n", 64),
        ("presence_penalty", 0.0),
        ("frequency_penalty", -0.0),
        ("logit_bias", {}),
        ("logit_bias", {"1": 0.0}),
        ("response_format", ResponseFormat(type="text")),
        ("grammar", ""),
        ("tools", []),
        ("suffix", ""),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("tool_choice", {}),
        ("chat_template_kwargs", {"a": 1}),
        ("reasoning", ReasoningOptions(effort="low")),
        ("reasoning", ReasoningOptions(max_tokens=5, optional=True)),
        ("lora", []),
        ("return_progress", False),
        ("routing", RoutingOptions(worker_id="w", policy="random", explain=False)),
    ],
)
def test_a_value_that_changes_nothing_needs_nothing(field: str, value: object) -> None:
    assert list(validation.required_features(make(**{field: value}))) == []


def test_tools_that_may_not_be_called_need_nothing() -> None:
    assert list(validation.required_features(make(tools=[{}], tool_choice="none"))) == []


def test_every_need_is_named_in_a_request_that_has_several() -> None:
    asked = make(logprobs=1, presence_penalty=1.0, tools=[{}])
    assert [need.param for need in validation.required_features(asked)] == [
        "logprobs",
        "presence_penalty",
        "tools",
    ]


# What goes on to the worker


def test_a_bare_request_leaves_everything_to_the_model() -> None:
    assert validation.to_params(make()) == GenerationParams()


def test_only_the_prompt_can_be_asked_for_where_nothing_is_cached_if_its_log_probabilities_are_wanted() -> None:
    needs = list(validation.required_features(make(max_tokens=0, prompt_logprobs=0)))
    assert needs == [RequiredFeature("prompt_logprobs", "prompt_logprobs")]


def test_everything_that_was_asked_goes_on_to_the_worker() -> None:
    asked = {
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.25,
        "seed": 0,
        "repetition_penalty": 1.5,
        "repetition_last_n": 0,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logprobs": 0,
        "return_progress": True,
        "prompt_logprobs": 3,
        "prompt_logprobs_from": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [7, 0],
        "ignore_eos": True,
        "stream": False,
        "return_token_ids": True,
        "return_sampling": True,
        "cache_prompt": False,
        "cache_salt": "salt",
        "cache_control": CacheControl(ttl_ms=0.0),
        "session_id": "session",
        "lora": [Lora(name="style", scale=0.5)],
        "priority": -3,
        "response_format": ResponseFormat(type="json_object"),
        "regex": "a",
        "choice": ["a"],
        "grammar": "start: /a/",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "continue_final_message": True,
        "parse_output": False,
        "reasoning": ReasoningOptions(max_tokens=5),
    }
    assert set(asked) | {"logit_bias"} == set(GenerationParams.__struct_fields__)
    expected = GenerationParams(**asked, logit_bias={"12": 1.5, 13: -2.0})  # type: ignore[arg-type]
    assert validation.to_params(make(**asked, logit_bias={"12": 1.5, 13: -2.0})) == expected


@pytest.mark.parametrize("name", ["-1", "x", "", "1.0", "0x1", "4294967296", "٣", -1, 2**32])
def test_a_logit_bias_must_name_token_ids(name: str | int) -> None:
    assert refusal(make(logit_bias={name: 1.0})).param == "logit_bias"


def test_a_logit_bias_has_limits() -> None:
    validation.check_request(
        make(logit_bias={str(number): limits.MAX_LOGIT_BIAS for number in range(limits.MAX_LOGIT_BIASES)})
    )
    assert refusal(make(logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIASES + 1), 1.0))).param == "logit_bias"
    assert refusal(make(logit_bias={"1": limits.MAX_LOGIT_BIAS * 1.001})).param == "logit_bias"
    assert refusal(make(logit_bias={"1": -limits.MAX_LOGIT_BIAS * 1.001})).param == "logit_bias"


def test_one_stop_string_is_a_list_of_one() -> None:
    assert validation.to_params(make(stop="end")).stop_strings == ["end"]
    assert make(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert make().stop_strings == []


def test_the_parts_of_a_content_are_joined() -> None:
    parts = [ContentPart(type="text", text="a "), ContentPart(type="text", text=""), ContentPart(type="text", text="b")]
    assert validation.message_text(ChatMessage(role="user", content=parts)) == "a b"
    assert validation.message_text(ChatMessage(role="user", content="a b")) == "a b"
    assert validation.message_text(ChatMessage(role="assistant", tool_calls=[{}])) == ""


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(st.integers(-(2**40), 2**40), st.floats(), st.sampled_from([0, 1])) for name in RANGES
        },
    )
)
@settings(max_examples=150)
def test_a_request_is_taken_or_the_field_that_is_out_of_range_is_named(fields: dict[str, float]) -> None:
    wrong = [name for name, value in fields.items() if not RANGES[name].contains(value)]
    if not wrong:
        validation.check_request(make(**fields))
    else:
        assert refusal(make(**fields)).param in wrong


# Earlier streams


@pytest.mark.parametrize(
    ("token_ids", "fields", "param"),
    [
        ([], {}, "resume_from.token_ids"),
        ([1, -1], {}, "resume_from.token_ids[1]"),
        ([1 << 32], {}, "resume_from.token_ids[0]"),
        ([1, 2, 3], {"max_tokens": 3}, "resume_from.token_ids"),
    ],
)
def test_a_request_continues_after_some_tokens_but_fewer_than_it_may_have(
    token_ids: list[int], fields: dict[str, object], param: str
) -> None:
    error = refusal(make(resume_from=ResumeFrom(token_ids=token_ids), **fields))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)


def test_a_request_may_continue_after_all_tokens_but_one() -> None:
    validation.check_request(make(resume_from=ResumeFrom(token_ids=[0, limits.MAX_TOKEN_ID]), max_tokens=3))


def test_a_whole_answer_has_no_log_probabilities_of_given_tokens() -> None:
    resume_from = ResumeFrom(token_ids=[1])
    error = refusal(make(resume_from=resume_from, logprobs=0, stream=False))
    assert (error.code, error.param) == (Code.UNSUPPORTED, "resume_from")
    validation.check_request(make(resume_from=resume_from, logprobs=0))
    validation.check_request(make(resume_from=resume_from, stream=False))


def test_tokens_of_another_hash_scheme_are_refused_if_the_client_names_it() -> None:
    for resume_from in (None, ResumeFrom(token_ids=[1]), ResumeFrom(token_ids=[1], hash_scheme="xxh3-64:a")):
        validation.check_resume(make(resume_from=resume_from), "xxh3-64:a")
    with pytest.raises(errors.RequestError) as caught:
        validation.check_resume(make(resume_from=ResumeFrom(token_ids=[1], hash_scheme="xxh3-64:b")), "xxh3-64:a")
    assert (caught.value.error.code, caught.value.error.param) == (Code.UNSUPPORTED, "resume_from.hash_scheme")


# Runs


def run(**fields: object) -> internal.Run:
    right: dict[str, object] = {
        "request_id": "default:r",
        "attempt": 1,
        "epoch": "1-a",
        "router_id": "r",
        "reply": "_INBOX.a",
        "encoding": "json",
        "token_ids": b"",
        "params": GenerationParams(),
    }
    return internal.Run(**(right | fields))  # type: ignore[arg-type]


def refusal_of_run(asked: internal.Run) -> errors.Error:
    with pytest.raises(errors.RequestError) as caught:
        validation.check_run(asked)
    return caught.value.error


@pytest.mark.parametrize("name", sorted(set(RANGES) - {"timeout_ms"}))
def test_a_run_is_held_to_the_ranges_of_a_request(name: str) -> None:
    for outside in (RANGES[name].low - 1, RANGES[name].high + 1):
        error = refusal_of_run(run(params=GenerationParams(**{name: outside})))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, name)
    validation.check_run(run(params=GenerationParams(**{name: RANGES[name].high})))


@pytest.mark.parametrize(
    "key",
    ["", ":", "default", "default:", ":r", "=FF:r", "=41:r", "t:a.b", "t:a b", "t:\r\n", "t:" + "x" * 129, "t:a:b"],
)
def test_a_run_whose_key_no_router_makes_is_refused(key: str) -> None:
    assert refusal_of_run(run(request_id=key)).param == "request_id"


RESUME_RANGES = ranges_of(internal.RunResume)


@pytest.mark.parametrize("name", sorted(RESUME_RANGES))
def test_the_numbers_of_an_earlier_stream_are_held_to_their_ranges(name: str) -> None:
    for outside in (RESUME_RANGES[name].low - 1, RESUME_RANGES[name].high * 2):
        resume = internal.RunResume(token_ids=b"\1\0\0\0", **{name: outside})  # type: ignore[arg-type]
        error = refusal_of_run(run(resume_from=resume))
        assert (error.code, error.param) == (Code.INVALID_REQUEST, f"resume_from.{name}")
    validation.check_run(run(resume_from=internal.RunResume(token_ids=b"\1\0\0\0")))


def test_a_run_continues_after_at_least_one_token() -> None:
    assert refusal_of_run(run(resume_from=internal.RunResume(token_ids=b""))).param == "resume_from.token_ids"


def test_a_run_of_any_request_that_is_right_is_right() -> None:
    asked = make(stop=["a"], logit_bias={"5": 1.0}, stop_token_ids=[3], logprobs=3, cache_salt="s", temperature=0.5)
    validation.check_request(asked)
    validation.check_run(run(params=validation.to_params(asked), remaining_ms=-3.0, age_ms=0.0))
    params, asking = (
        validation.to_params(make(logprobs=1, presence_penalty=0.5)),
        make(logprobs=1, presence_penalty=0.5),
    )
    assert list(validation.required_run_features(params)) == list(validation.required_features(asking))


def test_a_drop_says_which_attempt_of_which_request_it_means() -> None:
    validation.check_control(internal.Control(op="drop", request_id="t:r", attempt=0))
    for wrong in ({}, {"request_id": "t:r"}, {"attempt": 1}, {"request_id": "t:r", "attempt": -1}):
        with pytest.raises(errors.RequestError):
            validation.check_control(internal.Control(op="drop", **wrong))  # type: ignore[arg-type]


# Constraints


def json_schema(**schema: object) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))


def test_at_most_one_constraint_may_be_given() -> None:
    given: dict[str, object] = {
        "response_format": ResponseFormat(type="json_object"), "regex": "a", "choice": ["a"], "grammar": "start: /a/",
    }  # fmt: skip
    for name in given:
        validation.check_request(make(**{name: given[name]}))
        for other in given.keys() - {name}:
            error = refusal(make(**{name: given[name], other: given[other]}))
            assert error.code is Code.INVALID_REQUEST
            assert error.param in (name, other)
            assert name in error.message
            assert other in error.message
    # a format that leaves the text free is none
    validation.check_request(make(response_format=ResponseFormat(type="text"), regex="a"))
    validation.check_request(make(grammar="", regex="a", choice=[]))


def test_a_constraint_needs_an_end_token() -> None:
    assert refusal(make(regex="a", ignore_eos=True)).param == "ignore_eos"
    validation.check_request(make(regex="a", ignore_eos=False))
    validation.check_request(make(ignore_eos=True, response_format=ResponseFormat(type="text")))


def test_a_schema_is_required() -> None:
    for schema in (None, JsonSchema(name="n")):
        wanted = ResponseFormat(type="json_schema", json_schema=schema)
        assert refusal(make(response_format=wanted)).param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("most", "schema"),
    [
        (limits.MAX_SCHEMA_BYTES - len('{"const":""}'), lambda count: {"const": "x" * count}),
        (limits.MAX_SCHEMA_PROPERTIES, lambda count: {"properties": {f"p{n}": {} for n in range(count)}}),
        (
            limits.MAX_SCHEMA_PROPERTIES,
            lambda count: {"$defs": {"a": {}}, "anyOf": [{"properties": {f"p{n}": {} for n in range(count - 1)}}]},
        ),
        (limits.MAX_SCHEMA_PATTERNS, lambda count: {"patternProperties": {f"p{n}": {} for n in range(count)}}),
    ],
    ids=["bytes", "properties", "properties of all objects", "patterns"],
)
def test_a_schema_may_be_this_large_and_no_larger(most: int, schema: Callable[[int], dict[str, object]]) -> None:
    validation.check_request(make(response_format=json_schema(**schema(most))))
    error = refusal(make(response_format=json_schema(**schema(most + 1))))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "response_format.json_schema.schema")
    assert "at most" in error.message


@pytest.mark.parametrize(
    ("name", "most", "make_value"),
    [
        ("regex", limits.MAX_REGEX_BYTES, lambda count: "x" * count),
        ("grammar", limits.MAX_GRAMMAR_BYTES, lambda count: "x" * count),
        ("grammar", limits.MAX_GRAMMAR_RULES, lambda count: "r ::= x" * count),
        ("choice", limits.MAX_CHOICES, lambda count: ["x"] * count),
        ("choice", limits.MAX_CHOICE_BYTES, lambda count: ["x", "y" * (count - 1)]),
    ],
)
def test_another_constraint_may_be_this_large_and_no_larger(
    name: str, most: int, make_value: Callable[[int], object]
) -> None:
    validation.check_request(make(**{name: make_value(most)}))
    error = refusal(make(**{name: make_value(most + 1)}))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, name)


def test_a_choice_has_a_text() -> None:
    assert refusal(make(choice=["a", ""])).param == "choice[1]"


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        ([Lora(name=f"a{number}") for number in range(5)], "lora"),
        ([Lora(name="a"), Lora(name="b"), Lora(name="a")], "lora[2].name"),
        ([Lora(name="a", scale=4.001)], "lora[0].scale"),
        ([Lora(name="a", scale=-0.1)], "lora[0].scale"),
        ([Lora(name="a", scale=float("nan"))], "lora[0].scale"),
    ],
)
def test_adapters_beyond_their_limits_are_refused(lora: list[Lora], param: str) -> None:
    with pytest.raises(errors.RequestError) as refusal:
        validation.check_request(make(lora=lora))
    assert (refusal.value.error.code, refusal.value.error.param) == (errors.Code.INVALID_REQUEST, param)


def test_adapters_at_their_limits_are_allowed() -> None:
    validation.check_request(make(lora=[Lora(name=f"a{number}", scale=number * 4 / 3) for number in range(4)]))


SAID = ChatMessage(role="assistant", content="The")


def test_the_text_of_an_assistants_last_message_is_continued() -> None:
    asked = make(messages=[*USER, SAID], continue_final_message=True, tool_choice="auto")
    validation.check_request(asked)
    assert RequiredFeature("continue_final_message", "continue_final_message") in list(
        validation.required_features(asked)
    )
    assert validation.needed_feature(asked) == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "continue_final_message"),
        ({"messages": USER}, "messages[0].role"),
        ({"messages": [SAID, *USER]}, "messages[1].role"),
        ({"messages": [ChatMessage(role="assistant", content="")]}, "messages[0].content"),
        ({"messages": [ChatMessage(role="assistant", content="", reasoning_content="hm")]}, "messages[0].content"),
        (
            {"messages": [ChatMessage(role="assistant", content="x", tool_calls=[{"function": {"name": "f"}}])]},
            "messages[0].tool_calls",
        ),
        ({"messages": [SAID], "tools": [tool()], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_nothing_else_is_continued(fields: dict[str, object], param: str) -> None:
    error = refusal(make(**fields, continue_final_message=True))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
