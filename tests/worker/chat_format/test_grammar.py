"""Whatever a grammar of calls allows is read as calls that the tools' schemas allow, in every known format."""

import codecs
import contextlib
import json
import random
import re
import time
from typing import Any, NamedTuple

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tests.support.in_part import in_part
from tokenbus.protocol.wire.tools import check_tools
from tokenbus.worker.chat_format.answer_grammar import Tools, calls_grammar, reasoning_grammar
from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, with_tokens
from tokenbus.worker.chat_format.lark import GrammarError
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer"},
            "alerts": {"type": "boolean"},
        },
        "required": ["city", "days"],
    },
    "now": {"type": "object", "properties": {}},
    "note": {"type": "object", "properties": {"tags": {"type": "array"}, "of": {"type": "object"}}, "required": ["of"]},
}
_PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
REFERRING: dict[str, dict[str, Any]] = {
    "definitions": {
        "type": "object",
        "$defs": {"Place": _PLACE, "Unit": {"enum": ["celsius", "fahrenheit"]}, "Days": {"type": "integer"}},
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "unit": {"$ref": "#/$defs/Unit"},
            "days": {"anyOf": [{"$ref": "#/$defs/Days"}, {"type": "null"}]},
        },
        "required": ["place", "unit", "days"],
    },
    "another_member": {
        "type": "object",
        "properties": {"from/to": _PLACE, "back": {"$ref": "#/properties/from~1to"}},
        "required": ["back"],
    },
    "its_own_id": {
        "$id": "https://example.com/place",
        "type": "object",
        "$defs": {"Count": {"type": "integer"}},
        "properties": {"count": {"$ref": "#/$defs/Count"}},
        "required": ["count"],
    },
    "all_of_it": {
        "$ref": "#/$defs/Whole",
        "$defs": {"Whole": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
}
"""Schemas with references to themselves."""
HERMES = Calls(kind=Kind.JSON, call_open="<tool_call>\n", call_close="\n</tool_call>")
ONE_OF_TWO = {
    "type": "object",
    "anyOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        {"properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False},
    ],
}
_MARKER = re.compile(
    r"<\|[^<>|]{1,32}\|>|<｜[^<>｜]{1,32}｜>|\[/?[A-Z_]{4,}\]|</?tool_call>|</?think>|<\|\"\|>|<[a-z_]+\|>"
)
FORMATS = {known.name: known.format for known in KNOWN_FORMATS}


class Walk(NamedTuple):
    """A random answer that a grammar allows."""

    tokens: list[int]
    is_complete: bool


class Vocabulary:
    """A token for each byte, one for each marker, and an end token."""

    bos_token_id = None

    def __init__(self, markers: list[str]) -> None:
        self.ids = {text: 256 + number for number, text in enumerate(markers)}
        self.eos_token_id = 256 + len(markers)
        self.special_token_ids = list(range(256, self.eos_token_id + 1))
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff<%d>" % one for one in self.special_token_ids]
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=[self.eos_token_id])

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def markers_of(form: ChatFormat) -> list[str]:
    """Returns the markers of a format that look like special tokens."""
    text = json.dumps(msgspec.to_builtins(form), ensure_ascii=False).replace('\\"', '"')
    return sorted(set(_MARKER.findall(text)))


def walk(grammar: str, vocabulary: Vocabulary, rng: random.Random, body: str = "") -> Walk:
    """Follows a grammar: mostly ASCII, but markers and forced tokens where they are allowed. `body` is what `@body`
    stands for."""
    grammars = [{"name": "top", "lark_grammar": grammar}] + [{"name": "body", "lark_grammar": body}] * bool(body)
    matcher = LLMatcher(vocabulary.tokenizer, json.dumps({"grammars": grammars}), limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error() + grammar
    found: list[int] = []
    while len(found) < 1_500 and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = bits[: len(vocabulary.tokens)].nonzero()[0].tolist()
        token_id = _choose(matcher.compute_ff_tokens(), allowed, vocabulary, rng)
        if token_id == vocabulary.eos_token_id:
            break
        assert matcher.consume_token(token_id)
        found.append(token_id)
    return Walk(found, matcher.is_accepting())


def _choose(forced: list[int], allowed: list[int], vocabulary: Vocabulary, rng: random.Random) -> int:
    if forced:
        return forced[0]
    ends = [one for one in allowed if one == vocabulary.eos_token_id]
    marks = [one for one in allowed if 256 <= one < vocabulary.eos_token_id]
    closing = [one for one in allowed if one < 256 and chr(one) in '"}],:']
    for choices, chance in ((marks, 0.3), (ends, 0.5), (closing, 0.4)):
        if choices and rng.random() < chance:
            return rng.choice(choices)
    return rng.choice([one for one in allowed if 32 <= one < 127] or allowed)


LIMITS = LLParserLimits(verbose_errors=False)


def parsed(parser: AnswerParser, tokens: list[int]) -> list[deltas.Delta]:
    """Returns all that a parser finds in an answer."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(bytes([one])) if one < 256 else "" for one in tokens]
    found = [one for token_id, text in zip(tokens, texts, strict=True) for one in parser.feed(token_id, text)]
    return found + parser.finish(cut_off=False)


def read(form: ChatFormat, tokens: list[int], tools: Tools) -> tuple[list[tuple[str, str]], bool]:
    """Returns the calls of an answer, name and arguments, and whether the last one is still open."""
    parser = AnswerParser(Rules(form), tools=tools, key="k", generation_prompt="")
    found = parsed(parser, tokens)
    names = [one.name for one in found if isinstance(one, deltas.CallBegin)]
    arguments = [""] * len(names)
    for one in found:
        if isinstance(one, deltas.CallArguments):
            arguments[one.index] += one.fragment
    return list(zip(names, arguments, strict=True)), parser.has_incomplete_call


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_required", [True, False], ids=["required", "auto"])
def test_every_answer_that_a_grammar_allows_is_read_as_calls_of_the_tools(name: str, is_required: bool) -> None:
    assert num_calls_read(name, TOOLS, is_required=is_required) or not is_required


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("gemma-4", "llama-4")])
@pytest.mark.parametrize("tool", in_part(REFERRING, 2))
def test_a_schema_that_refers_to_itself_is_followed(name: str, tool: str) -> None:
    assert num_calls_read(name, {tool: REFERRING[tool]}, is_required=True, num_answers=8)


@pytest.mark.parametrize("name", in_part([name for name, form in FORMATS.items() if form.calls], 4))
def test_a_value_may_be_one_of_many_thousand(name: str) -> None:
    values = [f"{number * 7_919 % 100_003}" for number in range(7_000)]
    code = {"type": "string", "enum": [*values, "1", "a</", "a"]}
    tool = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    assert num_calls_read(name, {"find": tool}, is_required=True, num_answers=2)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.calls and form.calls.values == "json"])
def test_members_may_be_named_in_each_of_several_schemas(name: str) -> None:
    assert num_calls_read(name, {"f": ONE_OF_TWO}, is_required=True, num_answers=8)


def num_calls_read(name: str, tools: Tools, *, is_required: bool, num_answers: int = 6) -> int:
    """Reads what the grammar of a format allows, and returns how many calls that were; all are what the tools want."""
    vocabulary = Vocabulary(markers_of(FORMATS[name]))
    form = with_tokens(FORMATS[name], vocabulary.ids)
    grammar = calls_grammar(form, tools, is_required=is_required)
    rng = random.Random(name)
    num_calls = 0
    for _ in range(num_answers):
        answer = walk(grammar, vocabulary, rng)
        calls, is_open = read(form, answer.tokens, tools)
        if not answer.is_complete:
            continue
        assert not is_open
        assert calls or not is_required
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools[called])
        num_calls += len(calls)
    return num_calls


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.reasoning])
@pytest.mark.parametrize("in_reasoning", [True, False], ids=["open", "not open"])
def test_behind_reasoning_comes_what_the_constraint_allows_and_nothing_else(name: str, in_reasoning: bool) -> None:
    vocabulary = Vocabulary(markers_of(FORMATS[name]))
    form = with_tokens(FORMATS[name], vocabulary.ids)
    prompt = form.reasoning.open if form.reasoning and in_reasoning else ""
    grammar = reasoning_grammar(form, in_reasoning=in_reasoning)
    rng = random.Random(name)
    num_complete = 0
    for _ in range(6):
        answer = walk(grammar, vocabulary, rng, body="start: /[xyz]{3}/")
        parser = AnswerParser(Rules(form), tools=None, key="k", generation_prompt=prompt)
        content = "".join(one.text for one in parsed(parser, answer.tokens) if isinstance(one, deltas.Content))
        if answer.is_complete:
            assert re.fullmatch("[xyz]{3}", content), content
        num_complete += answer.is_complete
    assert num_complete


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_can_not_express_is_left_out_of_tools_and_refused_in_the_answers_own_schema(name: str) -> None:
    vocabulary = Vocabulary(markers_of(FORMATS[name]))
    form = with_tokens(FORMATS[name], vocabulary.ids)
    odd = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"uniqueItems": True}}
    tool = {"type": "object", "properties": {"metadata": odd}, "required": ["metadata"]}
    assert not problem_of(calls_grammar(form, {"note": tool}, is_required=True), vocabulary)
    with_content = calls_grammar(form, {"note": tool}, is_required=False, content=odd)
    assert "propertyNames" in problem_of(with_content, vocabulary)


def problem_of(grammar: str, vocabulary: Vocabulary) -> str:
    """Returns why a grammar can't be compiled, or an empty string."""
    return LLMatcher(vocabulary.tokenizer, json.dumps({"grammars": [{"lark_grammar": grammar}]})).get_error()


def test_a_keyword_that_cant_be_compiled_is_ignored_unless_the_tool_is_strict() -> None:
    vocabulary = Vocabulary([])
    for form in (ChatFormat(calls=HERMES), FORMATS["qwen-tags"]):
        tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
        tools = {"f": {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}}
        assert walk(calls_grammar(form, tools, is_required=True), vocabulary, random.Random(1)).tokens
        strict = calls_grammar(form, tools, is_required=True, strict=["f"])
        refused = LLMatcher(vocabulary.tokenizer, json.dumps({"grammars": [{"lark_grammar": strict}]}), limits=LIMITS)
        assert "uniqueItems" in refused.get_error()


def test_a_grammar_of_tagged_arguments_grows_with_their_number() -> None:
    def size(num_optional: int) -> int:
        names = [f"p{number}" for number in range(6 + num_optional)]
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names[:6]}
        return len(calls_grammar(FORMATS["qwen-tags"], {"f": schema}, is_required=True))

    assert size(200) - size(100) < 100 * 100


def test_tools_whose_grammar_would_be_too_large_are_refused() -> None:
    places = {f"p{number}": {"$ref": "#/$defs/Place"} for number in range(900)}
    schema = {
        "type": "object",
        "properties": places,
        "$defs": {"Place": {"type": "object", "description": "x" * 9_000}},
    }
    assert calls_grammar(ChatFormat(calls=HERMES), {"f": schema}, is_required=True)
    with pytest.raises(GrammarError, match="take more than 2,000,000 characters"):
        calls_grammar(FORMATS["qwen-tags"], {"f": schema}, is_required=True)


_CHAIN = {f"s{depth}": {"anyOf": [{"$ref": f"#/$defs/s{depth + 1}"}] * 20} for depth in range(8)}
HOSTILE: dict[str, dict[str, Any]] = {
    "alternatives of alternatives": {
        "properties": {"p": {"$ref": "#/$defs/s0"}},
        "$defs": _CHAIN | {"s8": {"type": "string"}},
    },
    "many references": {
        "properties": {f"p{number}": {"$ref": "#/$defs/s"} for number in range(999)},
        "$defs": {"s": {"type": "string"}},
    },
    "references over a long way": {
        "properties": {f"p{number}": {"$ref": "#/$defs/s"} for number in range(900)},
        "$defs": {"s": {"$ref": "#" + "/x" * 15_000}},
    },
    "references to a long list": {
        "properties": {f"p{number}": {"$ref": "#/$defs/s"} for number in range(900)},
        "$defs": {"s": {"enum": [f"{number:x}" for number in range(4_000)]}},
    },
}
"""Schemas that a request may have, and that would take seconds or years if each reference were followed anew."""


@pytest.mark.parametrize("name", ["qwen-tags", "gemma-4", "kimi-k3"])
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_schema_takes_no_more_time_than_its_size_demands(name: str, schema: dict[str, Any]) -> None:
    check_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    began = time.thread_time()
    with contextlib.suppress(GrammarError):
        calls_grammar(FORMATS[name], {"f": schema}, is_required=True)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_arguments_are_read_in_no_more_time_than_their_number_demands(schema: dict[str, Any]) -> None:
    key = next(iter(schema["properties"]))
    call = f"<tool_call>\n<function=f>\n<parameter={key}>\nx\n</parameter>\n</function>\n</tool_call>"
    parser = AnswerParser(Rules(FORMATS["qwen-tags"]), tools={"f": schema}, key="k")
    began = time.thread_time()
    for _ in range(500):
        parser.feed_text(call)
    assert time.thread_time() - began < 1
    assert parser.calls == 500
