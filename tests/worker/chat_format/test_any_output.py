"""Rules that hold for any output whatsoever, in any format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answers import ORDINARY, Answer, Token, read, together
from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, KnownFormat, with_tokens
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import MAX_WHITESPACE, Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind

TOOLS: dict[str, dict[str, object]] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}},
    "get_weather": {},
}
NAMES_AS_KEYS = ChatFormat(
    calls=Calls(kind=Kind.JSON, section_open="<|tools|>[", section_close="]<|/tools|>", separator=", ", name_key="")
)
SPECIAL = re.compile(r"<\|[^|>]+\|>|<｜[^｜>]+｜>|｜DSML｜|\[/?[A-Z_]+\]|</?[a-z_|]+>")
TEXTS = (
    "f", "get_weather", '{"name": "f", "arguments": {"a": 1}}', '{"a": "b"}', '"name"', '"arguments"', "{", "}", '"',
    "'", "[", "]", "(", ")", ":", ",", "=", "\\", "\\u00e9", "1", "-1.5e3", "true", "None", "a", "b", "a=", 'a="x"',
    " ", "\n", "\n\n", " " * (MAX_WHITESPACE - 1), "\t" * (MAX_WHITESPACE + 7), "x" * 1200, "x < y", "é🌸", "<",
    ">", "/>",
    '{"f": {"a": 1}, "f": {}}', "functions.f:0", "analysis", "final", " to=functions.f", "\ud800", "\udfff",
)  # fmt: skip


def markers(form: ChatFormat) -> list[str]:
    """Returns all texts of a format that a model may write."""
    found: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for one in value.values():
                collect(one)
        elif isinstance(value, list | tuple):
            for one in value:
                collect(one)

    collect(msgspec.to_builtins(form))
    return [text for text in found if text.strip() and "{" not in text]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Rules, list[Token]]:
    """Draws a format, whose special tokens are known or not, and tokens made of its markers and of other texts."""
    form = draw(st.sampled_from([*(known.format for known in KNOWN_FORMATS), NAMES_AS_KEYS]))
    texts = markers(form)
    special = sorted({found for text in texts for found in SPECIAL.findall(text)})
    if special and draw(st.booleans()):
        form = with_tokens(form, {text: place for place, text in enumerate(special)})
    pieces = draw(st.lists(st.sampled_from(texts) | st.sampled_from(TEXTS) | st.text(max_size=5), max_size=30))
    tokens: list[Token] = []
    for piece in pieces:
        for part in re.split(f"({SPECIAL.pattern})", piece):
            if part in form.tokens and draw(st.integers(0, 9)):
                tokens.append((form.tokens[part], draw(st.sampled_from(["", part]))))
            else:
                tokens += [(ORDINARY, character) for character in part]
    return Rules(form), tokens


def read_groups(
    rules: Rules, groups: Sequence[Sequence[Token]], *, hold: bool, cut_off: bool, tools: bool = True
) -> Answer:
    parser = AnswerParser(rules, tools=TOOLS if tools else None, key="request", hold_calls=hold)
    found = [one for group in groups for one in parser.feed_tokens(group)]
    answer = together(found + parser.finish(cut_off=cut_off))
    assert parser.calls == len(answer.calls)
    assert parser.has_incomplete_call == any(not call.complete for call in answer.calls)
    return answer


@settings(max_examples=400)
@given(outputs(), st.booleans(), st.booleans(), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_how_an_output_is_cut_into_pieces_changes_nothing(
    drawn: tuple[Rules, list[Token]], hold: bool, cut_off: bool, tools: bool, sizes: list[int]
) -> None:
    rules, tokens = drawn
    groups, at = [], 0
    while at < len(tokens):
        size = sizes[len(groups) % len(sizes)]
        groups.append(tokens[at : at + size])
        at += size
    whole = read_groups(rules, [tokens], hold=hold, cut_off=cut_off, tools=tools)
    assert read_groups(rules, [[token] for token in tokens], hold=hold, cut_off=cut_off, tools=tools) == whole
    assert read_groups(rules, groups, hold=hold, cut_off=cut_off, tools=tools) == whole


@settings(max_examples=300)
@given(outputs(), st.booleans(), st.booleans())
def test_complete_calls_have_a_name_and_one_object_of_arguments(
    drawn: tuple[Rules, list[Token]], hold: bool, cut_off: bool
) -> None:
    rules, tokens = drawn
    answer = read_groups(rules, [tokens], hold=hold, cut_off=cut_off)
    for call in answer.calls:
        assert call.name
        assert call.id
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if hold:
        assert all(call.complete for call in answer.calls)


@settings(max_examples=300)
@given(st.sampled_from(KNOWN_FORMATS), st.text(alphabet="ab \n.,;é🌸", max_size=200))
def test_a_text_without_markers_comes_out_as_it_is(known: KnownFormat, text: str) -> None:
    form = known.format
    prompt = "<|start|>assistant<|channel|>final<|message|>" if form.channels else ""
    answer = read(form, text, prompt=prompt, pieces=7)
    assert answer == Answer(content=text, calls=[])


@settings(max_examples=300)
@given(outputs())
def test_no_character_of_an_answer_without_calls_is_lost(drawn: tuple[Rules, list[Token]]) -> None:
    rules, tokens = drawn
    if rules.form.channels is not None:
        return
    parser = AnswerParser(rules, tools=TOOLS, key="request", hold_calls=True)
    found = parser.feed_tokens(tokens) + parser.finish(cut_off=False)
    if parser.calls:
        return
    said = "".join(one.text for one in found if isinstance(one, deltas.Content | deltas.ReasoningDelta))
    texts = {token: text for text, token in rules.form.tokens.items()}
    written = "".join(texts.get(token, text) for token, text in tokens)
    pattern = "|".join(re.escape(one.strip()) for one in sorted(markers(rules.form), key=len, reverse=True))
    assert is_contained(re.sub(rf"{pattern}|\s|[\ud800-\udfff]", "", written), said)
    assert is_contained(said.replace("\ufffd", ""), written)


def is_contained(part: str, text: str) -> bool:
    """Returns whether a text has all characters of another, in its order."""
    characters = iter(text)
    return all(one in characters for one in part)


@pytest.mark.parametrize("known", KNOWN_FORMATS, ids=lambda known: known.name)
@pytest.mark.parametrize(
    "text", [" ", "\n", "<", "{", '"', "\\", "[", "1", "<tool_call>\n", "<function=", "</function>"]
)
def test_what_is_held_back_is_bounded(known: KnownFormat, text: str) -> None:
    """Only a call without a name and a value whose type is not known may be held back for long."""
    form = known.format
    parser = AnswerParser(Rules(form), tools={"f": {}}, key="request")
    said = sum(len(getattr(one, "text", "")) for _ in range(3000) for one in parser.feed_text(text))
    assert said >= 3000 * len(text) - 2 * 1024 - len(text) or said == 0 == len(text.strip())
