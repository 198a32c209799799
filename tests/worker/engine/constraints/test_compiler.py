"""Constraints are compiled within limits, and kept for those that ask again."""

import json

import pytest

from tests.support.tiny_vocabulary import TOKENS, compiler, constraint, encode
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError


def test_a_constraint_is_compiled_once() -> None:
    made = compiler()
    first = made.compile(constraint("regex", "a+"))
    first.accept(encode("a")[0])
    assert repr(made) == "<ConstraintCompiler, 1 cached>"
    assert not made.compile(constraint("regex", "a+")).allowed()[0], "it begins anew"
    assert repr(made) == "<ConstraintCompiler, 1 cached>"
    made.compile(constraint("regex", "a+", "marker"))
    assert repr(made) == "<ConstraintCompiler, 2 cached>"


def test_only_those_that_were_used_last_are_kept() -> None:
    made = compiler()
    for number in range(100):
        made.compile(constraint("regex", f"a{{{number}}}b"))
        made.compile(constraint("regex", "kept"))
    assert repr(made) == "<ConstraintCompiler, 64 cached>"


def test_what_is_kept_is_bounded_in_bytes() -> None:
    made = compiler()
    for number in range(12):
        made.compile(constraint("choice", json.dumps([f"{number}{'x' * 30_000}"])))
    assert repr(made) == "<ConstraintCompiler, 4 cached>"


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", r"[^\s\S]", "allows no text"),
        ("gbnf", "root ::= none", "Rule 'none' not found"),
        ("lark", "start: none", "unknown name"),
        ("json_schema", '{"type": "poem"}', "poem"),
        ("json_schema", '{"$ref": "https://example.com/"}', "does not fetch"),
    ],
)
def test_an_error_says_why_in_one_line(kind: str, source: str, problem: str) -> None:
    with pytest.raises(ConstraintError, match=problem) as raised:
        compiler().compile(constraint(kind, source))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 200


def test_json_may_be_written_in_another_way_if_the_schema_says_so() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "x-guidance": {"whitespace_flexible": True}}
    matcher = compiler().compile(constraint("json_schema", json.dumps(schema)))
    matcher.accept(encode("[")[0])
    assert matcher.allowed()[encode("\n")[0]]
    strict = compiler().compile(constraint("json_schema", json.dumps(schema | {"x-guidance": {}})))
    strict.accept(encode("[")[0])
    assert not strict.allowed()[encode("\n")[0]]


# Tokenizers


def test_a_tokenizer_that_puts_a_space_before_a_text_is_understood() -> None:
    """Tokenizers of SentencePiece do this, but not behind a line break."""

    def with_space(text: str) -> list[int]:
        return encode(text if text.startswith("\n") else f" {text}")

    made = ConstraintCompiler(ModelTokens(TOKENS, {0, 1}, with_space))
    assert made.compile(constraint("regex", "name!")).accept_forced(9) == [*encode("name!"), 0]


@pytest.mark.parametrize("part", ["abcx!", "abé", "日本x"])
def test_of_a_long_text_that_is_forced_only_the_beginning_is_tokenized(part: str) -> None:
    asked: list[int] = []

    def noted(text: str) -> list[int]:
        asked.append(len(text.encode()))
        return encode(text)

    made = ConstraintCompiler(ModelTokens(TOKENS, {0, 1}, noted))
    matcher = made.compile(constraint("choice", json.dumps([part * 250])))
    taken: list[int] = []
    while not taken or taken[-1] != 0:
        taken += matcher.accept_forced(50)
    assert taken[:-1] == encode(part * 250)
    assert max(asked) <= 300


def test_a_tokenizer_that_changes_a_text_is_not_followed() -> None:
    made = ConstraintCompiler(ModelTokens(TOKENS, {0, 1}, lambda text: encode(text.upper())))
    matcher = made.compile(constraint("regex", "abcx!"))
    assert matcher.accept_forced(9) == [*encode("abcx!"), 0]


def test_an_end_token_that_has_a_text_is_no_part_of_an_output() -> None:
    """Some tokenizers find the end token wherever its text stands."""
    tokens = [b"<end>", *TOKENS[1:]]

    def with_end(text: str) -> list[int]:
        return [0] if text == "<end>" else encode(text)

    made = ConstraintCompiler(ModelTokens(tokens, {0}, with_end))
    assert made.compile(constraint("regex", "<end>")).accept_forced(9) == [*encode("<end>"), 0]
    assert not made.compile(constraint("regex", "(<end>|x)y")).allowed()[0]
