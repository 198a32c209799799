"""Tools are checked field by field, and errors name the field and what is allowed."""

from typing import Any

import pytest

from tokenbus.protocol.wire import errors, internal, limits
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.messages import ChatMessage, GenerateRequest


def tool(name: object = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def check(*tools: dict[str, Any]) -> None:
    validation.check_request(GenerateRequest(messages=[ChatMessage(role="user", content="x")], tools=list(tools)))


def refusal(*tools: dict[str, Any]) -> errors.Error:
    with pytest.raises(errors.RequestError) as caught:
        check(*tools)
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    return caught.value.error


def test_a_tool_needs_no_more_than_a_name() -> None:
    check(tool(), tool("g", description=None, parameters=None), tool("h", description="d", parameters={}, strict=True))


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * limits.MAX_TOOL_NAME_CHARS])
def test_a_name_that_is_allowed(name: str) -> None:
    check(tool(name))


@pytest.mark.parametrize("name", ["", "a b", "é", "a\n", "a:0", "x" * (limits.MAX_TOOL_NAME_CHARS + 1), 7, None])
def test_a_name_that_is_not_allowed(name: object) -> None:
    error = refusal(tool("a"), tool(name))
    assert error.param == "tools[1].function.name"
    assert error.message == "tools[1].function.name: must be 1 to 128 of A-Z a-z 0-9 _ . -"


def test_two_tools_may_not_have_one_name() -> None:
    error = refusal(tool("a"), tool("b"), tool("a"))
    assert error.message == "tools[2].function.name: 'a' is also the name of an earlier tool"


def test_as_many_tools_as_the_limit_and_not_one_more() -> None:
    tools = [tool(f"f{number}") for number in range(limits.MAX_TOOLS + 1)]
    check(*tools[:-1])
    assert refusal(*tools).message == "tools: at most 128 tools are allowed, got 129"


def test_a_tool_may_be_as_large_as_the_limit_and_not_one_byte_larger() -> None:
    text = "x" * (limits.MAX_TOOL_BYTES - len('{"name":"f","description":""}'))
    check(tool(description=text))
    assert refusal(tool(description=text + "x")).param == "tools[0].function"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({}, "type"),
        ({"type": "retrieval"}, "type"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": "f"}, "function"),
        (tool(description=7), "function.description"),
        (tool(parameters=[]), "function.parameters"),
        (tool(parameters={"a": {None: 1}}), "function"),
        (tool(parameters={"type": "array"}), "function.parameters.type"),
        (tool(parameters={"type": ["object", "null"]}), "function.parameters.type"),
    ],
)
def test_a_mistake_in_a_tool_is_named(bad: dict[str, Any], field: str) -> None:
    error = refusal(tool("a"), bad)
    assert error.param == f"tools[1].{field}"
    assert error.message.startswith(f"{error.param}: must be ")


def test_a_worker_checks_the_tools_of_a_conversation_too() -> None:
    conversation = [ChatMessage(role="user", content="hi")]
    validation.check_tokenize(internal.Tokenize(messages=conversation, tools=[tool()]))
    with pytest.raises(errors.RequestError):
        validation.check_tokenize(internal.Tokenize(messages=conversation, tools=[tool(), tool()]))


@pytest.mark.parametrize(
    ("choice", "param", "problem"),
    [
        ("sometimes", "tool_choice", "must be auto, none, required or"),
        ({"type": "function"}, "tool_choice", "must be auto, none, required or"),
        ({"type": "function", "function": {"name": 7}}, "tool_choice", "must be auto, none, required or"),
        ({"type": "function", "function": {"name": "b"}}, "tool_choice.function.name", "is not the name of one of"),
    ],
)
def test_a_choice_is_a_mode_or_names_a_tool(choice: Any, param: str, problem: str) -> None:
    asked = GenerateRequest(messages=[ChatMessage(role="user", content="x")], tools=[tool("a")], tool_choice=choice)
    with pytest.raises(errors.RequestError) as caught:
        validation.check_request(asked)
    assert caught.value.error.param == param
    assert problem in caught.value.error.message


def test_nothing_can_be_chosen_where_there_are_no_tools() -> None:
    asked = GenerateRequest(messages=[ChatMessage(role="user", content="x")], tool_choice="required")
    with pytest.raises(errors.RequestError) as caught:
        validation.check_request(asked)
    assert caught.value.error.message == "tool_choice: there are no tools to choose from"


def test_tools_need_a_conversation() -> None:
    with pytest.raises(errors.RequestError) as caught:
        validation.check_request(GenerateRequest(prompt="x", tools=[tool("a")]))
    assert caught.value.error.param == "tools"


def test_all_tools_together_have_a_limit_of_properties() -> None:
    def tools(count: int) -> list[dict[str, Any]]:
        quarter = limits.MAX_TOOL_PROPERTIES // 4
        parts = [{f"p{number}": {} for number in range(quarter)}] * 3 + [
            {f"q{number}": {} for number in range(quarter)}
        ]
        extra = {f"r{number}": {} for number in range(count - 4 * quarter)}
        schemas = [*parts, extra]
        return [tool(f"f{place}", parameters={"anyOf": [{"properties": one}]}) for place, one in enumerate(schemas)]

    check(*tools(limits.MAX_TOOL_PROPERTIES))
    assert refusal(*tools(limits.MAX_TOOL_PROPERTIES + 1)).param == "tools"


def test_all_tools_together_have_a_limit_of_objects_and_arrays() -> None:
    """The parameters of each are an object with an array of `count` objects."""

    def tools(*counts: int) -> list[dict[str, Any]]:
        return [tool(f"f{place}", parameters={"enum": [{}] * count}) for place, count in enumerate(counts)]

    quarter = limits.MAX_TOOL_VALUES // 4 - 2
    check(*tools(quarter, quarter, quarter, quarter))
    assert refusal(*tools(quarter, quarter, quarter, quarter + 1)).param == "tools"


def test_each_tool_has_the_limit_of_properties_that_a_schema_has() -> None:
    def parameters(count: int) -> dict[str, Any]:
        return {"properties": {f"p{number}": {} for number in range(count)}}

    check(tool("a", parameters=parameters(limits.MAX_SCHEMA_PROPERTIES)))
    error = refusal(tool("a"), tool("b", parameters=parameters(limits.MAX_SCHEMA_PROPERTIES + 1)))
    assert error.param == "tools[1].function.parameters"
