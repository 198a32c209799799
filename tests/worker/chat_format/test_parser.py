"""The rules of reading answers, on formats that are known."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.support.answers import ORDINARY, Answer, known, read
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import MAX_WHITESPACE, Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Reasoning, Values

HERMES = known("hermes")
TAGS = known("qwen-tags")
NAMES_AS_KEYS = ChatFormat(
    calls=Calls(kind=Kind.JSON, section_open="<|tools|>[", section_close="]", separator=", ", name_key="")
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
WEATHER: dict[str, dict[str, object]] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "any": {},
        },
    }
}


def tagged(arguments: str) -> str:
    return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"


def argument(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def arguments_of(output: str) -> object:
    (call,) = read(TAGS, output, tools=WEATHER, pieces=3).calls
    assert call.complete
    return json.loads(call.arguments)


# Golden examples: how each kind of call is written, and what is read.

EXAMPLES = [
    (HERMES, f"<think>\nhm\n</think>\n\nhi\n{CALL}\n{CALL}", ("hi", "hm", ["f", "f"])),
    (
        known("mistral"),
        'hi[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}',
        ("hi", "", ["f", "f"]),
    ),
    (known("mistral-array"), '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ("", "", ["f"])),
    (
        known("kimi-k2"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "", ["f"]),
    ),
    (
        known("deepseek-v3.1"),
        'hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("hi", "", ["f"]),
    ),
    (
        known("deepseek-v3"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", "", ["f"]),
    ),
    (known("gemma-4"), "<|tool_call>call:f{a:1}<tool_call|>hi", ("hi", "", ["f"])),
    (known("llama-3"), '{"name": "f", "parameters": {"a": 1}}', ("", "", ["f"])),
    (known("llama-4"), "[f(a=1), f(a=1)]", ("", "", ["f", "f"])),
    (
        known("glm"),
        "r</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        ("", "r", ["f"]),
    ),
    (TAGS, "hi\n" + tagged(argument("a", "1")), ("hi", "", ["f"])),
    (
        known("deepseek-v4"),
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ("", "", ["f"]),
    ),
    (
        known("kimi-k3"),
        "r<|close|>think<|sep|><|open|>response<|sep|>hi<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        ("hi", "r", ["f"]),
    ),
    (
        known("gpt-oss"),
        "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>commentary<|message|>hi<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ("hi", "r", ["f"]),
    ),
    (
        ChatFormat(calls=Calls(kind=Kind.NAMED, call_open="<function=", name_close=">", call_close="</function>")),
        'hi <function=f>{"a": 1}</function>',
        ("hi ", "", ["f"]),
    ),
    (
        ChatFormat(
            calls=Calls(kind=Kind.NAMED, call_open=">>>", name_close="\n"),
            content_open=">>>all\n",
            generation_prompt=">>>",
        ),
        'all\nhi>>>f\n{"a": 1}',
        ("hi", "", ["f"]),
    ),
    (
        ChatFormat(
            calls=Calls(
                kind=Kind.JSON,
                section_open="<|START_ACTION|>[",
                section_close="]<|END_ACTION|>",
                separator=", ",
                name_key="tool_name",
                arguments_key="parameters",
                id_key="tool_call_id",
            ),
            reasoning=Reasoning(open="<|START_THINKING|>", close="<|END_THINKING|>"),
            content_open="<|START_RESPONSE|>",
            content_close="<|END_RESPONSE|>",
        ),
        "<|START_THINKING|>r<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        ("", "r", ["f"]),
    ),
    (
        NAMES_AS_KEYS,
        '<|tools|>[{"f": {"a": 1}}, {"f": {"a": 1}}]',
        ("", "", ["f", "f"]),
    ),
    (
        ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.PYTHON,
                section_open="<|tool_call_start|>[",
                section_close="]<|tool_call_end|>",
                separator=", ",
                name_close="(",
                key_close="=",
                argument_separator=", ",
                call_close=")",
            )
        ),
        "<|tool_call_start|>[f(a=1)]<|tool_call_end|>hi",
        ("hi", "", ["f"]),
    ),
]


@pytest.mark.parametrize("pieces", [0, 1, 5])
@pytest.mark.parametrize(("form", "output", "expected"), EXAMPLES)
def test_each_kind_of_call_is_read(
    form: ChatFormat, output: str, expected: tuple[str, str, list[str]], pieces: int
) -> None:
    content, reasoning, calls = read(form, output, tools={"f": {}}, pieces=pieces).brief()
    assert (content, reasoning, [name for name, _ in calls]) == expected
    assert [json.loads(arguments) for _, arguments in calls] == [{"a": 1}] * len(calls)


# Markers.


def test_a_special_token_is_a_marker_and_a_text_that_spells_it_is_content() -> None:
    form = known("hermes", **{"<tool_call>": 7, "</tool_call>": 8})
    inner = '\n{"name": "f", "arguments": {}}\n'
    real = [(7, "<tool_call>"), (ORDINARY, inner), (8, "</tool_call>")]
    spelled = [(ORDINARY, "<tool_call>"), (ORDINARY, inner), (ORDINARY, "</tool_call>")]
    assert read(form, real).brief() == ("", "", [("f", "{}")])
    assert read(form, spelled).brief() == (f"<tool_call>{inner}</tool_call>", "", [])


def test_a_special_token_is_found_when_its_text_is_empty() -> None:
    form = known("hermes", **{"<tool_call>": 7, "</tool_call>": 8})
    tokens = [(7, ""), (ORDINARY, '{"name": "f", "arguments": {}}'), (8, "")]
    assert read(form, tokens).brief() == ("", "", [("f", "{}")])


def test_a_special_token_inside_of_a_string_is_its_text() -> None:
    form = known("hermes", **{"<tool_call>": 7, "</tool_call>": 8})
    tokens = [(7, ""), (ORDINARY, '{"name": "f", "arguments": {"a": "'), (8, ""), (ORDINARY, '"}}'), (8, "")]
    assert read(form, tokens).brief() == ("", "", [("f", '{"a": "</tool_call>"}')])


def test_a_text_can_not_forge_a_special_token() -> None:
    form = known("hermes", **{"<tool_call>": 7, "</tool_call>": 8})
    forged = "".join(map(chr, range(0xD800, 0xD810)))
    assert read(form, forged).content == "\ufffd" * 16


def test_markup_in_an_answer_without_tools_is_content() -> None:
    parser = AnswerParser(Rules(HERMES), tools=None, key="request")
    assert parser.feed_text(CALL) + parser.finish(cut_off=False) == [deltas.Content(CALL)]


# Reasoning.


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("", "<think>\nr\n</think>\n\nhi", ("hi", "r")),
        ("<think>\n", "r\n</think>\n\nhi", ("hi", "r")),
        ("<|im_start|>assistant\n<think>\n", "r\n</think>\n\nhi", ("hi", "r")),
        ("<think>\n\n</think>\n\n", "hi", ("hi", "")),
        ("<think>\n", "\n</think>\n\nhi", ("hi", "")),
        ("<think>\n", "r", ("", "r")),
        ("<think>\n", "r\n</think>\n\n  indented", ("  indented", "r")),
    ],
)
@pytest.mark.parametrize("pieces", [0, 1])
def test_reasoning_is_what_stands_between_its_markers(
    prompt: str, output: str, expected: tuple[str, str], pieces: int
) -> None:
    answer = read(HERMES, output, prompt=prompt, pieces=pieces)
    assert (answer.content, answer.reasoning) == expected


def test_reasoning_and_calls_may_follow_each_other() -> None:
    answer = read(HERMES, f"<think>\none\n</think>\n\n{CALL}\n<think>\ntwo\n</think>\n\nhi")
    assert answer.brief() == ("hi", "onetwo", [("f", '{"a": 1}')])


def test_a_call_inside_of_reasoning_ends_it_only_where_the_format_says_so() -> None:
    call = tagged(argument("a", "1"))
    inside = read(TAGS, f"r\n{call}", prompt="<think>\n")
    assert inside.brief() == ("", "r", [("f", '{"a": 1}')])
    assert read(HERMES, f"r\n{CALL}", prompt="<think>\n").brief() == ("", f"r\n{CALL}", [])


# Content around calls.


@pytest.mark.parametrize(
    ("output", "content"),
    [
        (f"before\n{CALL}", "before"),
        (f"before {CALL}\n{CALL} after", "before after"),
        (f"\n\n{CALL}\n", ""),
        ("a < b and <tool", "a < b and <tool"),
        ("spaces at the end \n", "spaces at the end \n"),
        ("\n", "\n"),
    ],
)
@pytest.mark.parametrize("pieces", [0, 1])
def test_whitespace_belongs_to_markers_where_the_template_writes_it(output: str, content: str, pieces: int) -> None:
    assert read(HERMES, output, pieces=pieces).content == content


@pytest.mark.parametrize("pieces", [0, 1])
def test_whitespace_before_a_marker_is_held_back_while_it_may_be_one_of_several(pieces: int) -> None:
    form = msgspec.structs.replace(HERMES, turn_close=("<|end|>",))
    assert read(form, f"hi\n{CALL}", pieces=pieces).content == "hi"
    assert read(form, "hi\n<|end|>", pieces=pieces).content == "hi\n"


def test_content_goes_out_as_it_comes_but_for_what_may_be_a_marker() -> None:
    parser = AnswerParser(Rules(HERMES), tools={}, key="request")
    said = [parser.feed_text(piece) for piece in ("Hello ", "world", " <", "b> <tool", "_box>", "\n", "x")]
    assert [[delta.text for delta in one if isinstance(delta, deltas.Content)] for one in said] == [
        ["Hello"],
        [" world"],
        [],
        [" <b>"],
        [" <tool_box>"],
        [],
        ["\nx"],
    ]


# Arguments.


def test_arguments_go_out_as_they_come() -> None:
    parser = AnswerParser(Rules(HERMES), tools={}, key="request")
    parser.feed_text('<tool_call>\n{"name": "f", "arguments": {"text": "')
    assert parser.feed_text("one ") == [deltas.CallArguments(0, "one ")]
    assert parser.feed_text("two\\") == [deltas.CallArguments(0, "two")]
    assert parser.feed_text('n"}}') == [deltas.CallArguments(0, '\\n"}')]
    assert parser.feed_text("</tool_call>") == [deltas.CallEnd(0)]


def test_texts_between_tags_go_out_as_they_come_and_other_types_at_their_end() -> None:
    parser = AnswerParser(Rules(TAGS), tools=WEATHER, key="request")
    parser.feed_text("<tool_call>\n<function=f>\n")
    assert parser.feed_text("<parameter=city>\nNew ") == [deltas.CallArguments(0, '{"city": "New ')]
    assert parser.feed_text('"York"\n') == [deltas.CallArguments(0, '\\"York\\"')]
    assert parser.feed_text("</parameter>\n<parameter=days>\n1") == [deltas.CallArguments(0, '", "days": ')]
    assert parser.feed_text("2\n</parameter>\n</function>") == [deltas.CallArguments(0, "12}"), deltas.CallEnd(0)]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "12", "12"),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("city", "  two\n", "  two\n"),
        ("days", "12", 12),
        ("days", "many", "many"),
        ("where", '{"a": [1, 2]}', {"a": [1, 2]}),
        ("where", "null", None),
        ("any", "True", True),
        ("any", "free text", "free text"),
        ("unknown", "1.5", 1.5),
    ],
)
def test_the_schema_decides_what_a_value_without_quotes_is(key: str, value: str, expected: object) -> None:
    assert arguments_of(tagged(argument(key, value))) == {key: expected}


@pytest.mark.parametrize(
    "value", ["</parameter> and </function> in a line", "<parameter=city> is text", "</tool_call> and <tool_call>"]
)
def test_markup_inside_of_a_value_is_text_if_what_follows_does_not_continue_the_call(value: str) -> None:
    assert arguments_of(tagged(argument("city", value))) == {"city": value}


def test_a_value_that_is_not_closed_ends_where_the_next_argument_or_the_end_of_the_call_stands() -> None:
    unclosed = "<parameter=city>\nDallas\n<parameter=days>\n3\n"
    assert arguments_of(tagged(unclosed)) == {"city": "Dallas", "days": 3}


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert arguments_of(tagged("")) == {}
    assert read(HERMES, '<tool_call>{"name": "f"}</tool_call>').brief() == ("", "", [("f", "{}")])
    assert read(HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>').brief()[2] == [("f", "{}")]


def test_arguments_may_come_before_the_name_and_as_a_string_of_json() -> None:
    early = '<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>'
    encoded = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(HERMES, early).brief()[2] == [("f", '{"name": "x"}')]
    assert read(HERMES, encoded).brief()[2] == [("f", '{"a": 1}')]


# Calls without markers.


@pytest.mark.parametrize(
    "output",
    [
        '{"a": 1} is a dict',
        '{"name": "unknown", "parameters": {}}',
        '{"name": 1}',
        "{}",
        'See: {"name": "f", "parameters": {}}',
    ],
)
def test_json_that_names_no_tool_at_the_beginning_is_content(output: str) -> None:
    assert read(known("llama-3"), output, tools={"f": {}}, pieces=4).brief() == (output, "", [])


@pytest.mark.parametrize("output", ["[1, 2]", "[link](x)", "[f] is a list", "[unknown(a=1)]"])
def test_brackets_that_call_no_tool_are_content(output: str) -> None:
    assert read(known("llama-4"), output, tools={"f": {}}, pieces=4).brief() == (output, "", [])


# Calls that are malformed or cut off.


@pytest.mark.parametrize("body", ["no json", '{"name": "f", "arguments": [1]}', '{"arguments": {}}', '{"name": "f"'])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_malformed_call_is_content(body: str, pieces: int) -> None:
    output = f"hi\n<tool_call>{body}</tool_call> bye"
    answer = read(HERMES, output, hold=True, pieces=pieces)
    assert answer == Answer(content=output, calls=[])


def test_a_call_that_is_cut_off_is_never_complete() -> None:
    for end in range(len(CALL)):
        for answer in (
            read(HERMES, f"hi\n{CALL}\n{CALL[:end]}", cut_off=True),
            read(HERMES, f"hi\n{CALL}\n{CALL[:end]}", cut_off=True, hold=True),
        ):
            assert [call.complete for call in answer.calls][:1] == [True]
            assert not any(call.complete for call in answer.calls[1:])
            assert answer.brief()[2] == [("f", '{"a": 1}')]


def test_a_held_call_that_is_cut_off_leaves_nothing() -> None:
    answer = read(HERMES, f"hi\n{CALL[:40]}", cut_off=True, hold=True)
    assert answer == Answer(content="hi", calls=[])


def test_what_has_gone_out_of_a_call_that_is_cut_off_stays_without_an_end() -> None:
    parser = AnswerParser(Rules(HERMES), tools={}, key="request")
    parser.feed_text(CALL[:40])
    parser.finish(cut_off=True)
    assert parser.has_incomplete_call
    (call,) = read(HERMES, CALL.partition("1")[0], cut_off=True).calls
    assert (call.name, call.arguments, call.complete) == ("f", '{"a": ', False)


def test_a_model_that_ends_its_turn_behind_the_arguments_has_made_the_call() -> None:
    unclosed = CALL.removesuffix("\n</tool_call>")
    assert read(HERMES, unclosed).brief()[2] == [("f", '{"a": 1}')]
    assert read(HERMES, unclosed, cut_off=True).brief()[2] == []


# Ids.


def test_ids_follow_from_the_request_and_the_place_of_the_call() -> None:
    one, other = read(HERMES, f"{CALL}\n{CALL}").calls
    assert one.id != other.id
    assert [call.id for call in read(HERMES, f"{CALL}\n{CALL}", pieces=1).calls] == [one.id, other.id]
    assert one.id.startswith("call_")
    assert len(one.id) == 29


def test_ids_have_the_form_that_the_format_asks_for() -> None:
    written = "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]f[ARGS]{}"
    given, made = read(known("mistral"), written).calls
    assert given.id == "123456789"
    assert len(made.id) == 9
    assert made.id.isalnum()
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(known("kimi-k2"), kimi).calls[0].id == "functions.f:3"


# Sections.


def test_text_between_calls_of_a_section_is_dropped_and_text_in_place_of_calls_is_content() -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    form = known("kimi-k2")
    assert read(form, f"a{begin} noise {call}{end}b", pieces=3).brief() == ("ab", "", [("f", "{}")])
    assert read(form, f"a{begin}{end}b", pieces=3).brief() == ("ab", "", [])
    assert read(form, f"a{begin} noise {end}b", pieces=3).brief() == (f"a{begin} noise {end}b", "", [])
    assert read(form, f"a{begin}{call} said behind it").brief() == ("a said behind it", "", [("f", "{}")])
    assert read(form, f"{begin}{'x' * 5000}{end}").content == f"{begin}{'x' * 5000}{end}"


def test_messages_to_others_than_the_client_and_the_tools_are_left_out() -> None:
    form = known("gpt-oss")
    code = "<|channel|>commentary to=python <|constrain|>code<|message|>print()<|end|>"
    output = f"{code}<|start|>assistant<|channel|>final<|message|>hi"
    assert read(form, output, tools={}).brief() == ("hi", "", [])


def test_a_header_that_says_nothing_is_content() -> None:
    output = "<|channel|>odd<|message|>text<|end|>"
    assert read(known("gpt-oss"), output).content == "<|channel|>odd<|message|>text"


# Limits, and what is easily mixed up.


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize("before", ["", "a"])
def test_so_much_whitespace_belongs_to_a_marker_and_no_more(before: str, pieces: int) -> None:
    output = f"{before}{' ' * (MAX_WHITESPACE + 36)}{CALL}"
    assert read(HERMES, output, pieces=pieces).content == before + " " * 36
    assert read(HERMES, f"{before}{' ' * MAX_WHITESPACE}{CALL}", pieces=pieces).content == before


def test_a_call_after_a_malformed_one_is_the_first() -> None:
    malformed = '<tool_call>{"name": "g", "arguments": {1}}</tool_call>'
    answer = read(HERMES, f"{malformed}\n{CALL}", hold=True)
    assert answer.brief() == (malformed, "", [("f", '{"a": 1}')])


def test_a_value_without_an_end_ends_with_the_turn_but_not_where_the_turn_is_cut_off() -> None:
    output = "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>"
    assert read(known("glm"), output, prompt="").brief() == ("", "", [("f", '{"a": "x"}')])
    assert read(known("glm"), output, prompt="", cut_off=True).brief() == ("", "", [])


def test_two_requests_have_different_ids() -> None:
    first, second = (AnswerParser(Rules(HERMES), tools={}, key=key).feed_text(CALL)[0] for key in ("one", "two"))
    assert isinstance(first, deltas.CallBegin)
    assert isinstance(second, deltas.CallBegin)
    assert first.id != second.id


@pytest.mark.parametrize("name", ["hermes", "llama-3", "gpt-oss", "kimi-k3", "glm-lines"])
def test_an_answer_that_continues_a_text_has_all_of_what_is_new(name: str) -> None:
    form = known(name)
    prompt = ChatRules(form, []).continued_prompt()
    parser = AnswerParser(Rules(form), tools={"f": {}}, key="", generation_prompt=prompt, continues=True)
    text = '\n {"name": "f", "parameters": {}}'
    assert parser.feed_text(text) + parser.finish(cut_off=False) == [deltas.Content(text)]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    ("form", "output"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>'),
        (NAMES_AS_KEYS, '<|tools|>[{"f": {}, "g": {}}]'),
        (NAMES_AS_KEYS, '<|tools|>[{"f": null, "f": {}}]'),
    ],
)
def test_a_call_with_two_names_is_malformed(form: ChatFormat, output: str, *, hold: bool) -> None:
    answer = read(form, output, hold=hold, pieces=1)
    assert [call.complete for call in answer.calls] == [False] * (not hold)
    assert output.endswith(answer.content)
