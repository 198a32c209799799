"""A matcher allows what its constraint accepts and nothing else, wherever it is resumed."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_vocabulary import (
    END,
    MARKER,
    OTHER_END,
    choice,
    compiler,
    constraint,
    decode,
    encode,
    walk,
)
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import Matcher

COMPILER = compiler()


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def texts(*token_texts: str) -> set[int]:
    return {token_id for text in token_texts for token_id in encode(text)}


# What it accepts

_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.tuples(st.integers(-50, 50), st.integers(0, 200)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.lists(st.one_of(st.integers(-9, 9), st.text('abé"\\', max_size=4)), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


def _objects(members: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sets(st.sampled_from(sorted(members)) if members else st.nothing()).map(
        lambda required: {
            "type": "object",
            "properties": members,
            "required": sorted(required),
            "additionalProperties": False,
        }
    )


def _containers(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.tuples(children, st.integers(0, 3)).map(
            lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
        st.dictionaries(st.text("abn_é", min_size=1, max_size=5), children, max_size=4).flatmap(_objects),
    )


SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS, st.integers(0, 99))
def test_every_output_is_json_of_the_schema(schema: dict[str, Any], seed: int) -> None:
    tokens = walk(COMPILER.compile(constraint("json_schema", json.dumps(schema))), choice(seed))
    assert tokens[-1] in (END, OTHER_END)
    jsonschema.validate(json.loads(decode(tokens)), schema)


_ATOMS = st.sampled_from(["a", "b", "[ab]", "[0-9]", "name", "é", "x{2}", "true"])
REGEXES = st.recursive(
    _ATOMS,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda several: f"({'|'.join(several)})"),
        st.tuples(parts, st.sampled_from(["?", "{0,2}", "{2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(REGEXES, st.integers(0, 99))
def test_every_output_matches_the_regex_as_a_whole(source: str, seed: int) -> None:
    tokens = walk(COMPILER.compile(constraint("regex", source)), choice(seed))
    assert tokens[-1] in (END, OTHER_END)
    assert re.fullmatch(source, decode(tokens))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text('abé"\\\n/', min_size=1, max_size=6), min_size=1, max_size=8), st.integers(0, 99))
def test_every_output_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    tokens = walk(COMPILER.compile(constraint("choice", json.dumps(choices))), choice(seed))
    assert decode(tokens) in choices


@settings(max_examples=100, deadline=None)
@given(REGEXES, REGEXES, st.integers(0, 99))
def test_gbnf_and_lark_of_the_same_language_agree(first: str, second: str, seed: int) -> None:
    lark = COMPILER.compile(constraint("lark", f"start: /{first}/ other\nother: /{second}/"))
    regex = COMPILER.compile(constraint("regex", f"({first})({second})"))
    tokens = walk(lark, choice(seed))
    for token_id in tokens[:-1]:
        assert regex.allowed()[token_id]
        regex.accept(token_id)


# The same, wherever it is resumed


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, st.integers(0, 99), st.data())
def test_an_output_is_the_same_however_many_forced_tokens_are_taken_at_once(
    schema: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    asked = constraint("json_schema", json.dumps(schema))
    whole = walk(COMPILER.compile(asked), choice(seed))
    for limit in (0, 1, 3):
        assert walk(COMPILER.compile(asked), choice(seed), limit=limit) == whole
    count = data.draw(st.integers(0, len(whole) - 1))
    resumed = compiler().compile(asked)
    for token_id in whole[:count]:
        resumed.accept(token_id)
    assert walk(resumed, choice(seed), before=whole[:count]) == whole


def test_forced_tokens_are_taken_up_to_the_next_choice() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"]}
    matcher = COMPILER.compile(constraint("json_schema", json.dumps(schema | {"additionalProperties": False})))
    assert decode(matcher.accept_forced(32)) == '{"name": '
    assert matcher.forced() is None
    matcher.accept(encode("true")[0])
    assert matcher.accept_forced(32) == [*encode("}"), END]


def test_no_more_forced_tokens_are_taken_than_there_may_be() -> None:
    matcher = COMPILER.compile(constraint("regex", "xyzxyz"))
    assert decode(matcher.accept_forced(4)) == "xyzx"
    assert decode(matcher.accept_forced(1)) == "y"


def test_a_copy_goes_its_own_way() -> None:
    matcher = COMPILER.compile(constraint("regex", "[ab]c"))
    copy = matcher.copy()
    matcher.accept(encode("b")[0])
    assert decode(matcher.accept_forced(1)) == "c"
    assert allowed(copy) == texts("a", "b")


# Ends


def test_a_complete_output_may_only_end() -> None:
    matcher = COMPILER.compile(constraint("regex", "xz"))
    assert matcher.accept_forced(32) == [*encode("xz"), END]


def test_an_output_may_end_or_go_on_where_both_are_right() -> None:
    matcher = COMPILER.compile(constraint("regex", "x+"))
    matcher.accept(encode("x")[0])
    assert matcher.forced() is None
    assert allowed(matcher) == {END, OTHER_END, *texts("x")}


def test_a_token_that_is_not_allowed_is_refused() -> None:
    matcher = COMPILER.compile(constraint("regex", "x"))
    with pytest.raises(ConstraintError):
        matcher.accept(encode("y")[0])
    with pytest.raises(ConstraintError):
        matcher.allowed()


def test_a_grammar_that_gets_ever_slower_is_given_up() -> None:
    matcher = COMPILER.compile(constraint("lark", 'start: start start | "a" | start "a" | "a" start'))

    def go_on() -> None:
        for _ in range(2_000):
            matcher.allowed()
            matcher.accept(encode("a")[0])

    with pytest.raises(ConstraintError):
        go_on()


# What is free before it


@pytest.mark.parametrize("marker", [MARKER, "<end>"])
def test_an_output_is_free_up_to_the_marker(marker: int | str) -> None:
    matcher = COMPILER.compile(constraint("regex", "[0-9]x", marker))
    free = encode("I think, {}: <en")
    for token_id in free:
        assert allowed(matcher) >= texts("a", "{", "\n", "<")
        assert not allowed(matcher) & {END, OTHER_END}
        assert matcher.forced() is None
        matcher.accept(token_id)
    for token_id in [marker] if isinstance(marker, int) else encode("<end>"):
        assert matcher.allowed()[token_id]
        matcher.accept(token_id)
    assert allowed(matcher) == texts(*"0123456789", " ", "\n", "\t")
    matcher.accept(encode("\n")[0])
    matcher.accept(encode("7")[0])
    assert matcher.accept_forced(32) == [*encode("x"), END]


def test_a_grammar_can_name_tokens_by_their_ids() -> None:
    source = f'start: TEXT <[{MARKER}]> %json {{"enum": [true]}}\nTEXT: /[a-c]*/'
    matcher = COMPILER.compile(constraint("lark", source))
    assert allowed(matcher) == {MARKER, *texts("a", "b", "c"), *encode("ab"), *encode("abc")}
    matcher.accept(MARKER)
    assert matcher.accept_forced(32) == [*encode("true"), END]
