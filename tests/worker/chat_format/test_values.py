"""Values in the notations of models become JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import Alphabet
from tokenbus.worker.chat_format.parsing.values import MAX_DEPTH, ValueReader
from tokenbus.worker.contract.chat_format import Values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
ASCII_KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=st.characters(exclude_characters="@", codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.from_regex("[a-z_]{1,9}", fullmatch=True), inner, max_size=4)
    ),
)


def read(text: str, notation: Values = Values.JSON, *, size: int = 1, quote: str = '"') -> str:
    """Returns a value as JSON; the text arrives in pieces."""
    reader, cursor, out = ValueReader(notation, Alphabet({}), quote), Cursor(), list[str]()
    for at in range(0, len(text), size):
        cursor.append(text[at : at + size])
        if reader.read(cursor, out):
            return "".join(out)
    cursor.ended = True
    cursor.append("")
    if not reader.read(cursor, out):
        raise Malformed
    return "".join(out)


def bare(value: object) -> str:
    """Writes a value with keys without quotes and strings between @."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return f"@{value}@" if isinstance(value, str) else json.dumps(value)


@given(JSON, st.integers(1, 5), st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_as_it_is(value: object, size: int, indent: int | None, ascii_only: bool) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert json.loads(read(written, size=size)) == value


@given(JSON, st.integers(1, 5))
def test_python_literals_are_read(value: object, size: int) -> None:
    assert json.loads(read(repr(value), Values.PYTHON, size=size)) == value


@given(ASCII_KEYS, st.integers(1, 5))
def test_values_with_bare_keys_are_read(value: object, size: int) -> None:
    assert json.loads(read(bare(value), Values.BARE_KEYS, size=size, quote="@")) == value


@pytest.mark.parametrize(
    "text",
    ["{", "[1,", "{1: 2}", "{,}", "[,]", "[1 2]", "}", "{'a': 1}", "tru", "01", "1.", "nan", "[1}", '{"a" 1}', '"a'],
)
def test_what_is_no_json_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        read(text)


def test_a_value_may_nest_so_deep_and_no_deeper() -> None:
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
    with pytest.raises(Malformed):
        read("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [('"a\nb"', "a\nb"), ('"\\d"', "\\d"), ('"\\u00e9"', "é"), ('"\\u12"', "\\u12"), ('"\\\\"', "\\")],
)
def test_strings_that_are_not_quite_json_become_json(text: str, expected: str) -> None:
    assert json.loads(read(text)) == expected
    assert json.loads(read(text, size=100)) == expected


def test_half_a_character_is_replaced() -> None:
    assert json.loads(read("'\\U0000d800'", Values.PYTHON)) == "\ufffd"
