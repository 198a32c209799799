"""Tools are offered as functions, and their calls are found again."""

import json
from typing import Any

from tests.support.counted_names import CountedName
from tokenbus.gateway.openai.responses.endpoints import ENDPOINT
from tokenbus.gateway.openai.responses.tools import OfferedTools, ResponsesTool

PARAMETERS = {"type": "object", "properties": {"city": {"type": ["string", "null"], "default": None}}}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
CRM = {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "find"}, PATCH]}
SEARCH = {"type": "web_search"}


def offered(*tools: dict[str, Any], choice: Any = None) -> OfferedTools:
    return OfferedTools([(f"tools[{index}]", tool) for index, tool in enumerate(tools)], choice)


def names(tools: OfferedTools) -> list[str]:
    return [function["function"]["name"] for function in tools.functions]


def test_a_function_is_itself_and_what_a_server_would_have_to_run_is_left_out() -> None:
    tools = offered(SEARCH, WEATHER)
    assert tools.functions == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
    ]
    assert (tools.paths, tools.given) == (["tools[1]"], [WEATHER])


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    (function,) = offered(PATCH).functions
    assert function["function"] == {
        "name": "patch",
        "description": "Patches.",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }


def test_the_model_is_told_the_grammar_of_a_custom_tool() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    told = 'The argument `input` must follow this lark grammar:\nstart: "a"'
    (function,) = offered(PATCH | {"format": grammar}).functions
    assert function["function"]["description"] == f"Patches.\n\n{told}"
    (bare,) = offered({"type": "custom", "name": "c", "format": grammar}).functions
    assert bare["function"]["description"] == told
    (free,) = offered(PATCH | {"format": {"type": "text"}}).functions
    assert free["function"]["description"] == "Patches."


def test_calls_are_found_again_by_their_names() -> None:
    tools = offered(WEATHER, PATCH, CRM)
    assert names(tools) == ["weather", "patch", "crm__find", "crm__patch"]
    assert tools.paths == ["tools[0]", "tools[1]", "tools[2].tools[0]", "tools[2].tools[1]"]
    assert [tools.called(name) for name in (*names(tools), "other")] == [
        ResponsesTool("weather", None, False),
        ResponsesTool("patch", None, True),
        ResponsesTool("find", "crm", False),
        ResponsesTool("patch", "crm", True),
        ResponsesTool("other", None, False),
    ]


def test_every_form_of_a_choice() -> None:
    for choice, theirs in (
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        (  # as in chat completions
            {"type": "function", "function": {"name": "weather"}},
            {"type": "function", "function": {"name": "weather"}},
        ),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "function", "name": "find", "namespace": "crm"},
            {"type": "function", "function": {"name": "crm__find"}},
        ),
    ):
        tools = offered(WEATHER, PATCH, CRM, choice=choice)
        assert (tools.choice, len(tools.functions)) == (theirs, 4)


def test_allowed_tools_are_the_only_ones_that_are_offered() -> None:
    allowed = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "find", "namespace": "crm"}, SEARCH]
    tools = offered(WEATHER, PATCH, CRM, choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert (names(tools), tools.paths, tools.choice) == (
        ["patch", "crm__find"],
        ["tools[1]", "tools[2].tools[0]"],
        "required",
    )


def test_a_tool_without_a_proper_name_is_left_for_validation_to_refuse() -> None:
    nameless = {"type": "function", "name": ["weather"]}
    tools = offered(WEATHER, nameless, choice={"type": "allowed_tools", "mode": "auto", "tools": [WEATHER, nameless]})
    assert names(tools) == ["weather", ["weather"]]


def test_many_allowed_tools_are_looked_up_and_not_compared_with_all_that_are_offered() -> None:
    class Name(CountedName):
        __slots__ = ()

    tools = [WEATHER | {"name": Name(f"n{number}")} for number in range(100)]
    allowed = [{"name": f"n{number}"} for number in range(100)]
    assert len(offered(*tools, choice={"type": "allowed_tools", "tools": allowed}).functions) == 100
    assert Name.num_compared <= 4 * len(tools)


def test_tools_within_the_input_are_offered_with_the_others() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    body = {"model": "demo", "input": [more, {"role": "user", "content": "hi"}], "tools": [WEATHER]}
    parsed = ENDPOINT.parse(json.dumps(body).encode(), {}, "r")
    assert [tool["function"]["name"] for tool in parsed.requests[0].tools or []] == ["weather", "patch"]
    paths = [parsed.name_of(f"tools[{number}].function.name") for number in range(2)]
    assert paths == ["tools[0].name", "input[0].tools[0].name"]
