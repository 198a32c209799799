"""What is small takes little time, however it is made; what could take much is not small."""

import json
import random
import time

import msgspec
import numpy as np
import pytest

from tests.hostile.scale import IS_LONG, times
from tests.support import tiny_vocabulary
from tests.support.hostile_constraints import ALL
from tests.support.random_constraints import source
from tests.support.tiny_vocabulary import TOKENS, constraint
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError, is_small

MAX_COMPILE_S = 0.2
MAX_CALL_S = 0.05
"""CPU time, on any machine; a fifth of it is usual."""
PATTERN = {"type": "string", "pattern": "a" * 513}


def large_vocabulary() -> ModelTokens:
    """150,000 tokens of letters of several scripts."""
    rng, seen = random.Random(1), dict.fromkeys(TOKENS)
    parts = [
        "th",
        "e",
        "an",
        "in",
        "er",
        "on",
        "s",
        "ing",
        "tion",
        "q",
        "x",
        "1",
        "00",
        "é",
        "日",
        "本",
        "{",
        "}",
        ":",
        ",",
    ]
    while len(seen) < 150_000:
        seen["".join([rng.choice(["", " "]), *rng.choices(parts, k=rng.randint(1, 5))]).encode()] = None
    tokens = [b"", b"", b"", *(token for token in seen if token)]
    return ModelTokens(tokens, frozenset({0, 1}), tiny_vocabulary.encode)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    made = ConstraintCompiler(large_vocabulary()) if IS_LONG else tiny_vocabulary.compiler()
    made.prepare()
    return made


def follow(compiler: ConstraintCompiler, kind: str, text: str, rng: random.Random) -> tuple[float, float]:
    """Returns the CPU time to compile it, and that of the longest call of forty tokens."""
    began, longest_s = time.thread_time(), 0.0
    try:
        matcher = compiler.compile(constraint(kind, text))
    except ConstraintError:
        return time.thread_time() - began, 0.0
    compile_s = time.thread_time() - began
    try:
        for _ in range(40):
            since = time.thread_time()
            token_id = matcher.forced()
            if token_id is None:
                token_id = rng.choice(np.flatnonzero(matcher.allowed()).tolist())
            if token_id in compiler.tokens.end_token_ids:
                break
            matcher.accept(token_id)
            longest_s = max(longest_s, time.thread_time() - since)
    except ConstraintError:
        pass
    return compile_s, longest_s


@pytest.mark.parametrize(("kind", "most"), [("regex", 512), ("json_schema", 8_192)])
def test_a_small_one_takes_a_moment_whatever_it_is(compiler: ConstraintCompiler, kind: str, most: int) -> None:
    rng = random.Random(kind)
    for _ in range(times(150, 1_000)):
        text = source(rng, kind, most)
        if not is_small(constraint(kind, text)):
            continue
        compile_s, longest_s = follow(compiler, kind, text, rng)
        assert compile_s < MAX_COMPILE_S, text
        assert longest_s < MAX_CALL_S, text


@pytest.mark.parametrize("name", ALL)
def test_of_the_attacks_only_those_that_take_a_moment_are_small(compiler: ConstraintCompiler, name: str) -> None:
    kind, text = ALL[name]
    if is_small(constraint(kind, text)):
        compile_s, longest_s = follow(compiler, kind, text, random.Random(name))
        assert (compile_s < MAX_COMPILE_S, longest_s < MAX_CALL_S) == (True, True)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("regex", "a" * 512, True),
        ("regex", "a" * 513, False),
        ("regex", "é" * 257, False),
        ("choice", json.dumps(["x" * 16_380]), True),
        ("choice", json.dumps(["x" * 16_384]), False),
        ("gbnf", 'root ::= "a"', False),
        ("lark", 'start: "a"', False),
        ("json_schema", '{"type": "object"}', True),
        ("json_schema", json.dumps({"const": "x" * 8_192}), False),
        ("json_schema", json.dumps(PATTERN), False),
        ("json_schema", json.dumps(PATTERN | {"pattern": "a" * 512}), True),
        ("json_schema", json.dumps({"anyOf": [{"pattern": "a" * 300}, {"pattern": "b" * 300}]}), False),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 99_991}), False),
        ("json_schema", json.dumps({"patternProperties": {"a": {}}}), False),
        ("json_schema", '{"patt\\u0065rn": "a*"}', False),
        ("json_schema", json.dumps({"x-guidance": {"whitespace_pattern": "a*"}}), False),
    ],
)
def test_the_bounds(kind: str, text: str, expected: bool) -> None:
    assert is_small(constraint(kind, text)) is expected


def test_a_grammar_that_we_have_written_is_small_if_its_schemas_are() -> None:
    for text, expected in [("{}", True), ('{"multipleOf": 7}', False), (json.dumps(PATTERN), False)]:
        written = msgspec.structs.replace(constraint("lark", f"start: %json {text}"), is_written=True)
        assert is_small(written) is expected
    assert not is_small(msgspec.structs.replace(written, source="x" * 16_385))
