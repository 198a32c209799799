"""The fields of other servers are served under their own names, or refused by name."""

import json
from typing import Any

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.openai import chat, completions
from tokenbus.gateway.openai.responses import endpoints as responses
from tokenbus.gateway.serving.dialect import ApiEndpoint
from tokenbus.protocol.wire import limits, messages

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
}
ENDPOINTS: dict[str, ApiEndpoint[Any]] = {
    one.path: one for one in (chat.ENDPOINT, completions.ENDPOINT, responses.ENDPOINT)
}
ALL = pytest.mark.parametrize("path", BODIES)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = messages.ResponseFormat(type="json_schema", json_schema=messages.JsonSchema(schema=SCHEMA))
SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, {"response_format": JSON}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"response_format": JSON}),
    ({"structured_outputs": {"json_object": True}}, {"response_format": messages.ResponseFormat(type="json_object")}),
    ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"grammar": ""}, {"grammar": ""}),
    ({"guided_json": SCHEMA}, {"response_format": JSON}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"json_schema": SCHEMA}, {"response_format": JSON}),
    ({"json_schema": json.dumps(SCHEMA)}, {"response_format": JSON}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"cache_prompt": False}, {"cache_prompt": False}),
    ({"n_predict": 5}, {"max_tokens": 5}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repeat_last_n": 7}, {"repetition_last_n": 7}),
    ({"repeat_last_n": -1}, {"repetition_last_n": limits.MAX_TOKENS}),
    ({"random_seed": 3}, {"seed": 3}),
    ({"random_seed": 3, "seed": 3}, {"seed": 3}),
    ({"random_seed": -1}, {"seed": None}),
    ({"seed": -1}, {"seed": None}),
    ({"seed": -2}, {"seed": 2**32 - 2}),
    ({"seed": 2**63 - 1}, {"seed": 2**32 - 1}),
]
PROGRESS: list[tuple[dict[str, Any], bool | None]] = [
    ({"stream": True, "return_progress": True}, True),
    ({"return_progress": True}, None),
    ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, None),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"ebnf": ""}, "ebnf"),
    ({"regex": ""}, "regex"),
    ({"choice": []}, "choice"),
    ({"guided_regex": "a", "regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": ["a"] * 1_001}, "guided_choice"),
    ({"guided_json": "5"}, "guided_json"),
    ({"json_schema": {"type": "object", "properties": {}}, "regex": "a"}, "regex"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"n_predict": 2**40}, "n_predict"),
    ({"random_seed": 2**63}, "random_seed"),
    ({"seed": -(2**63) - 1}, "seed"),
]


def request_of(path: str, **fields: Any) -> messages.GenerateRequest:
    (request,) = ENDPOINTS[path].parse(json.dumps(BODIES[path] | fields).encode(), {}, "r", "m").requests
    assert isinstance(request, messages.GenerateRequest)
    return request


@ALL
@pytest.mark.parametrize(("fields", "wire"), SERVED)
def test_what_the_wire_has_is_served_under_other_names(path: str, fields: dict[str, Any], wire: dict[str, Any]) -> None:
    request = request_of(path, **fields)
    assert {name: getattr(request, name) for name in wire} == wire


@ALL
@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_an_error_has_the_name_that_the_client_gave(path: str, fields: dict[str, Any], param: str) -> None:
    error = refusal_of(lambda: request_of(path, **fields))
    assert (error.param or "").startswith(param), error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "asked"), PROGRESS)
def test_only_streams_tell_their_progress(path: str, fields: dict[str, Any], asked: bool | None) -> None:
    assert request_of(path, **fields).return_progress is asked


@pytest.mark.parametrize("place", ["schema", "value"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_format_may_have_its_schema_beside_its_type(path: str, place: str) -> None:
    for kind in ("json_object", "json_schema"):
        assert request_of(path, response_format={"type": kind, place: SCHEMA}).response_format == JSON
    for wrong in ({"type": "text"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}):
        refused = refusal_of(lambda wrong=wrong: request_of(path, response_format=wrong | {place: SCHEMA}))
        assert refused.param == f"response_format.{place}"
    asked = {"response_format": {"type": "json_object", place: SCHEMA}}
    parsed = ENDPOINTS[path].parse(json.dumps(BODIES[path] | asked).encode(), {}, "r", "m")
    assert parsed.name_of("response_format.json_schema.schema.type") == f"response_format.{place}.type"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_text_generation_inference_s_formats_are_served(path: str) -> None:
    named = {"name": "answer", "schema": SCHEMA}
    for kind, value in [("json", SCHEMA), ("json", json.dumps(SCHEMA)), ("json_schema", named)]:
        assert request_of(path, response_format={"type": kind, "value": value}).response_format == JSON
    asked = request_of(path, response_format={"type": "regex", "value": "[ab]+"})
    assert (asked.response_format, asked.regex) == (None, "[ab]+")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json"}}, "value"),
        ({"response_format": {"type": "json", "value": "[ab]+"}}, "value"),
        ({"response_format": {"type": "json", "json_schema": {"schema": SCHEMA}}}, "value"),
        ({"response_format": {"type": "regex"}}, "value"),
        ({"response_format": {"type": "regex", "value": ""}}, "value"),
        ({"response_format": {"type": "regex", "value": SCHEMA}}, "value"),
        ({"response_format": {"type": "regex", "value": "a", "schema": SCHEMA}}, "schema"),
        ({"response_format": {"type": "regex", "value": "a", "json_schema": {"schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "regex", "value": "a"}, "regex": "a"}, "value"),
        ({"response_format": {"type": "regex", "value": "a"}, "guided_regex": "a"}, "value"),
        ({"response_format": {"type": "grammar", "value": "a"}}, "type"),
    ],
)
def test_a_format_that_says_nothing_or_too_much_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    assert refusal_of(lambda: request_of("/v1/chat/completions", **fields)).param == f"response_format.{param}"


def test_a_bad_regex_or_schema_of_a_format_is_named_as_it_was_given() -> None:
    for place, name in [
        ({"type": "regex", "value": "a"}, "regex"),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, "response_format.json_schema.schema"),
    ]:
        body = json.dumps(BODIES["/v1/chat/completions"] | {"response_format": place}).encode()
        parsed = ENDPOINTS["/v1/chat/completions"].parse(body, {}, "r", "m")
        assert parsed.name_of(name) == f"response_format.value{'.schema' if name != 'regex' else ''}"


def test_a_format_has_one_schema() -> None:
    asked = {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}
    assert refusal_of(lambda: request_of("/v1/chat/completions", **asked)).param == "response_format.value"


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/chat/completions", "max_completion_tokens"), ("/v1/responses", "max_output_tokens")]
)
def test_the_same_limit_under_two_names_may_not_have_two_values(path: str, name: str) -> None:
    assert request_of(path, n_predict=5, **{name: 5}).max_tokens == 5
    assert refusal_of(lambda: request_of(path, n_predict=5, **{name: 6})).param == "n_predict"


def test_a_response_has_one_format() -> None:
    both = {"guided_json": SCHEMA, "text": {"format": {"type": "json_object"}}}
    assert refusal_of(lambda: request_of("/v1/responses", **both)).param == "guided_json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_switches_of_reasoning_become_the_templates_variable(path: str) -> None:
    for fields in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        assert request_of(path, **fields).chat_template_kwargs == {"enable_thinking": False}
    assert request_of(path, thinking={"type": "auto"}).chat_template_kwargs is None
    kept = request_of(path, thinking={"type": "enabled", "clear_thinking": False})
    assert kept.chat_template_kwargs == {"enable_thinking": True, "clear_thinking": False}
    wrong = refusal_of(lambda: request_of(path, thinking={"type": "enabled", "budget_tokens": -1}))
    assert wrong.param == "thinking.budget_tokens"
    both = request_of(path, thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert both.chat_template_kwargs == {"enable_thinking": False, "a": 1}
    assert refusal_of(lambda: request_of(path, thinking={"type": "much"})).param == "thinking.type"


def test_a_choice_of_tools_that_chooses_nothing_is_refused() -> None:
    assert refusal_of(lambda: request_of("/v1/chat/completions", tool_choice={})).param == "tool_choice"


def test_a_message_of_the_assistant_may_have_its_text_as_a_refusal_and_no_call_in_the_old_form() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "refusal": "No."}]
    request = request_of("/v1/chat/completions", messages=said)
    assert (request.messages or [])[1].content == "No."
    old = [*said, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]
    assert refusal_of(lambda: request_of("/v1/chat/completions", messages=old)).param == "messages[2].function_call"
