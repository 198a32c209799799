"""The prompt's end, the tools and the constraints of a request decide how its answer is parsed and what it may be."""

import time
from typing import Any

import pytest

from tests.support.answers import known
from tests.support.reasoning_vocabulary import KNOWN
from tests.support.tiny_vocabulary import compiler
from tests.worker.engine_client.test_parsed_generation import CALL, FORMAT, HELLO, PIECES, RULES, TURN
from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.protocol.wire.params import GenerationParams, JsonSchema, ReasoningOptions
from tokenbus.protocol.wire.tools import check_tools
from tokenbus.worker.broker.fence import FENCE_S
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.chat_format import ChatFormat
from tokenbus.worker.engine.constraints.grammar import ConstraintError, to_problem
from tokenbus.worker.streams.run_request import AnswerRules, answer_rules, to_constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
THINKING = ChatRules(FORMAT, [*PIECES, b"<think>"])


def rules_for(
    prompt: list[int], chat: ChatRules | None = RULES, *, is_chat: bool = True, can_constrain: bool = True, **asked: Any
) -> AnswerRules:
    run = internal.Run(
        request_id="default:r",
        attempt=1,
        epoch="e",
        router_id="r",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=b"",
        params=GenerationParams(**asked),
        is_chat=is_chat,
    )
    return answer_rules(run, prompt, chat, can_constrain=can_constrain)


def test_the_answer_to_a_prompt_is_not_parsed() -> None:
    assert rules_for([TURN], is_chat=False) == AnswerRules(None, None)
    assert rules_for([TURN], None) == AnswerRules(None, None)


def test_the_answer_to_a_conversation_is_parsed_unless_its_client_wants_the_text_as_it_is() -> None:
    assert rules_for([TURN]).parsing == engine_request.OutputParsing(generation_prompt="")
    assert rules_for([TURN], parse_output=False).parsing is None


@pytest.mark.parametrize(
    ("prompt", "expected"), [([HELLO, TURN], ""), ([TURN, HELLO], "Hello"), ([TURN, HELLO, TURN], ""), ([HELLO], "")]
)
def test_the_generation_prompt_is_what_follows_the_last_beginning_of_a_turn(prompt: list[int], expected: str) -> None:
    parsing = rules_for(prompt).parsing
    assert parsing is not None
    assert parsing.generation_prompt == expected


def test_text_that_spells_the_beginning_of_a_turn_begins_none() -> None:
    spelled = ChatRules(FORMAT, [*PIECES, b"<|assistant|>"])
    assert spelled.generation_prompt([TURN, HELLO, len(PIECES)]) == "Hello<|assistant|>"


def test_a_constraint_begins_behind_reasoning_that_the_prompt_has_opened() -> None:
    for prompt, is_open in (([TURN, len(PIECES)], True), ([TURN], False)):
        constraint = rules_for(prompt, THINKING, regex="a").constraint
        assert constraint is not None
        start = next(line for line in constraint.preamble.splitlines() if line.startswith("start:"))
        assert ("<think>" not in start) is is_open
        assert start.endswith("@body")


@pytest.mark.parametrize(
    ("effort", "max_tokens", "is_off"),
    [("none", None, True), ("low", None, False), (None, 0, True), (None, 5, False), ("none", 5, False)],
)
@pytest.mark.parametrize("asked", [{"regex": "a"}, {"tools": TOOLS}], ids=["constraint", "tools"])
def test_without_reasoning_a_constrained_answer_has_no_room_for_its_marker(
    asked: dict[str, Any], effort: str | None, max_tokens: int | None, is_off: bool
) -> None:
    wanted = ReasoningOptions(effort=effort, max_tokens=max_tokens)
    constraint = rules_for([TURN], THINKING, reasoning=wanted, **asked).constraint
    assert constraint is not None
    assert ("think" not in f"{constraint.preamble}{constraint.source}") is is_off


def test_an_answer_after_closed_reasoning_does_not_reason_again() -> None:
    chat = ChatRules(FORMAT, [*PIECES, b"<think>", b"\n\n</think>\n\n"])
    constraint = rules_for([TURN, len(PIECES), len(PIECES) + 1], chat, regex="a").constraint
    assert constraint is not None
    assert not constraint.preamble


@pytest.mark.parametrize(
    ("choice", "names"),
    [(None, ["f", "g"]), ("required", ["f", "g"]), ({"type": "function", "function": {"name": "g"}}, ["g"])],
)
def test_only_tools_that_may_be_called_are_looked_for(choice: Any, names: list[str]) -> None:
    found = rules_for([TURN], tools=TOOLS, tool_choice=choice)
    assert found.parsing is not None
    assert list(found.parsing.tools or ()) == names
    assert found.constraint is not None
    assert found.constraint.kind is engine_request.ConstraintKind.LARK
    assert ('"const": "f"' in found.constraint.source) is ("f" in names)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "bad"}}])
def test_a_tool_whose_schema_cant_be_compiled_is_named(choice: Any) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "poem"}}}}}
    constraint = rules_for([TURN], tools=[*TOOLS, bad], tool_choice=choice).constraint
    assert constraint is not None
    with pytest.raises(ConstraintError) as caught:
        compiler().compile(constraint)
    error = to_problem(caught.value, constraint)
    assert error.param == "tools[2].function.parameters"
    assert error.message == "tools[2].function.parameters: failed to compile JSON schema: Invalid type: poem"


def test_a_response_format_beside_tools_that_cant_be_compiled_is_named() -> None:
    wanted = messages.ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={"type": "poem"}))
    constraint = rules_for([TURN], tools=TOOLS, response_format=wanted).constraint
    assert constraint is not None
    with pytest.raises(ConstraintError) as caught:
        compiler().compile(constraint)
    assert to_problem(caught.value, constraint).param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "(a"}, "regex: unclosed group"),
        ({"regex": "(" + "a" * 300}, "regex: unclosed group"),
        ({"grammar": "start: /(a/"}, 'grammar: at 1(8): invalid regex "(a": unclosed group'),
        ({"grammar": "start: a\na: none"}, 'grammar: at 2(4): unknown name: "none"'),
    ],
)
def test_a_place_is_named_only_in_a_grammar_that_the_client_has_written(asked: dict[str, str], message: str) -> None:
    constraint = to_constraint(GenerationParams(**asked))  # type: ignore[arg-type]
    assert constraint is not None
    with pytest.raises(ConstraintError) as caught:
        compiler().compile(constraint)
    assert to_problem(caught.value, constraint).message == message


def test_with_none_the_token_that_opens_a_call_is_forbidden() -> None:
    found = rules_for([TURN], tools=TOOLS, tool_choice="none")
    assert (found.constraint, found.forbidden) == (None, (CALL,))
    assert found.parsing is not None
    assert found.parsing.tools is None


def test_a_whole_answer_has_complete_calls_only() -> None:
    parsing = rules_for([TURN], tools=TOOLS, stream=False).parsing
    assert parsing is not None
    assert parsing.hold_calls


def test_an_engine_that_constrains_nothing_serves_what_needs_no_constraint() -> None:
    assert rules_for([TURN], can_constrain=False, tools=TOOLS).constraint is None
    with pytest.raises(errors.RequestError) as caught:
        rules_for([TURN], can_constrain=False, tools=TOOLS, tool_choice="required")
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.UNSUPPORTED, "tool_choice")


def test_a_format_without_calls_refuses_tools() -> None:
    with pytest.raises(errors.RequestError) as caught:
        rules_for([TURN], ChatRules(ChatFormat(), PIECES), tools=TOOLS, tool_choice="required")
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.UNSUPPORTED, "tools")


def test_a_response_format_is_about_the_answer_without_calls() -> None:
    wanted = messages.ResponseFormat(type="json_object")
    source = rules_for([TURN], tools=TOOLS, response_format=wanted).constraint
    assert source is not None
    content = next(line for line in source.source.splitlines() if line.startswith("content:"))
    assert content.startswith("content: %json")
    assert "| <[1]>" in content


def test_an_answer_that_continues_a_text_does_not_reason_and_its_constraint_is_about_the_rest() -> None:
    found = rules_for([TURN, HELLO], THINKING, continue_final_message=True, regex="a")
    assert found.constraint == to_constraint(GenerationParams(regex="a"))
    assert found.parsing is not None
    assert found.parsing.continues
    assert not THINKING.begins_in_reasoning(found.parsing.generation_prompt or "")


def test_a_call_may_follow_a_continued_text_only_where_it_has_a_marker() -> None:
    found = rules_for([TURN, HELLO], continue_final_message=True, tools=TOOLS).constraint
    assert found is not None
    assert "call_0" in found.source
    bare = ChatRules(known("llama-3"), PIECES)
    assert rules_for([TURN, HELLO], bare, continue_final_message=True, tools=TOOLS).constraint is None


REFERRING = {f"p{number}": {"$ref": "#/$defs/d"} for number in range(900)}
COSTLY: dict[str, dict[str, Any]] = {
    "a text of a list to which all members refer": {
        "$defs": {"d": {"enum": [f"{number:04}" for number in range(4_000)]}},
        "properties": REFERRING,
    },
    "much beside what all members refer to": {
        "$defs": {"d": {"type": "string"}, "other": {"anyOf": [{"const": 1}] * 3_000}},
        "properties": REFERRING,
    },
    "alternatives of alternatives": {
        "$defs": {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 50} for level in range(9)},
        "properties": {"p": {"$ref": "#/$defs/d0"}},
    },
    "many levels above many alternatives": {"anyOf": [{"const": 1}] * 4_000},
}
for _ in range(25):
    COSTLY["many levels above many alternatives"] = {"anyOf": [COSTLY["many levels above many alternatives"]]}


@pytest.mark.parametrize("what", COSTLY)
@pytest.mark.parametrize("name", ["qwen-tags", "gemma-4", "hermes"])
def test_no_tools_stop_a_frontend_for_as_long_as_would_make_it_give_up_its_streams(name: str, what: str) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": COSTLY[what]}} for n in range(4)]
    check_tools(tools)
    began = time.process_time()
    rules_for([TURN], ChatRules(KNOWN[name], PIECES), tools=tools)
    assert time.process_time() - began < FENCE_S
