"""Chat formats are data: they can be sent, compared and prepared for any tokenizer."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, KnownFormat, known_format, with_tokens
from tokenbus.worker.chat_format.parsing import values
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.schemas import SchemaReader
from tokenbus.worker.contract.chat_format import ChatFormat


@pytest.mark.parametrize("known", KNOWN_FORMATS, ids=lambda known: known.name)
def test_a_format_is_the_same_after_it_was_sent(known: KnownFormat) -> None:
    form = with_tokens(known.format, {"<tool_call>": 7, "</s>": 2})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=ChatFormat) == form
    assert msgspec.json.decode(msgspec.json.encode(form), type=ChatFormat) == form


@pytest.mark.parametrize("known", KNOWN_FORMATS, ids=lambda known: known.name)
def test_a_template_is_recognised_by_the_texts_it_contains(known: KnownFormat) -> None:
    assert known_format("\n".join(known.contains)) is not None
    assert known_format("a template without tools") is None


def test_a_format_takes_those_special_tokens_of_a_tokenizer_that_its_markers_contain() -> None:
    form = next(one.format for one in KNOWN_FORMATS if one.name == "gpt-oss")
    ids = {"<|channel|>": 5, "<|end|>": 7, "<|endoftext|>": 9}
    assert with_tokens(form, ids).tokens == {"<|channel|>": 5, "<|end|>": 7}


def test_a_special_token_that_begins_like_another_is_told_from_it() -> None:
    form = ChatFormat(turn_close=("<a>", "<a><b>"), tokens={"<a>": 1, "<a><b>": 2})
    assert Rules(form).alphabet.encode("<a><b><a>") == "\ud800\ud801"


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "number"}, {"enum": [None]}]}, {"number", "null"}),
        ({"anyOf": [{"type": "number"}, {}]}, set()),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"type": "no such type"}, set()),
        ({"$ref": "#/$defs/x"}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_the_types_of_a_schema_are_those_it_allows(parameters: object, types: set[str]) -> None:
    assert SchemaReader({}).types_of(parameters) == types


def test_a_schema_that_nests_too_deeply_allows_anything() -> None:
    nested: object = {"type": "string"}
    for _ in range(1000):
        nested = {"anyOf": [nested]}
    assert SchemaReader({}).types_of(nested) == set()


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("1", {"integer"}, "1"),
        ("1", {"string", "null"}, '"1"'),
        ("null", {"string", "null"}, "null"),
        ("5", {"number"}, "5"),
        ("True", {"boolean"}, "true"),
        ("None", set(), "null"),
        ("[1, {}]", {"array"}, "[1, {}]"),
        ("[1,", {"array"}, '"[1,"'),
        (" 1e20\n", {"number"}, "1e20"),
        ("a\n", set(), '"a\\n"'),
        ("NaN", {"number"}, '"NaN"'),
        ("[" * 5000, set(), f'"{"[" * 5000}"'),
    ],
)
def test_a_value_without_quotes_becomes_json_of_a_type_that_is_allowed(
    text: str, types: set[str], expected: str
) -> None:
    assert values.to_json(text, types) == expected
