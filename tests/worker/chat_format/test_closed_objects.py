"""Objects have only the members that their schema names, unless it says more."""

import json
import time
from typing import Any

import pytest

from tests.support.tiny_vocabulary import END, OTHER_END, choice, compiler, decode, walk
from tokenbus.protocol.wire.params import GenerationParams, JsonSchema, ResponseFormat
from tokenbus.worker.chat_format.closed_objects import close_objects
from tokenbus.worker.streams.run_request import to_constraint

A = {"properties": {"a": {"type": "string"}}}
B = {"properties": {"b": {"type": "number"}}}
COMPILER = compiler()
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A, True]}, {"prefixItems": [CLOSED_A, True]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        (
            {"properties": {"x": A, "y": {}}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
            {
                "properties": {"x": CLOSED_A, "y": {}},
                "anyOf": [{"required": ["x"]}, {"required": ["y"]}],
                "additionalProperties": False,
            },
        ),
        (
            {"type": "object", "additionalProperties": A},
            {"type": "object", "additionalProperties": CLOSED_A},
        ),
    ],
)
def test_an_object_is_closed_wherever_it_is(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {"allOf": [A, B]},
        {**A, "oneOf": [B, {"properties": {"c": {}}}]},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {"allOf": [{"$ref": "#/$defs/C"}, B], "$defs": {"A": A, "C": {"anyOf": [{"$ref": "#/$defs/A"}]}}},
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
    ],
)
def test_one_that_says_more_or_is_described_twice_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_definitions_that_refer_to_each_other_in_long_chains_are_followed() -> None:
    chain: dict[str, Any] = {f"D{n}": {"$ref": f"#/$defs/D{n + 1}"} for n in range(5_000)}
    schema = {"allOf": [{"$ref": "#/$defs/D0"}, B], "$defs": chain | {"D5000": A}}
    assert close_objects(schema) == schema


@pytest.mark.parametrize("seed", range(10))
def test_every_answer_to_a_closed_schema_ends_and_has_no_key_twice(seed: int) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}, "c": {"type": "null"}}}
    schema = {"type": "object", "properties": {"a": inner, "d": {"enum": [1, 2]}}}
    asked = GenerationParams(response_format=ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)))
    constraint = to_constraint(asked)
    assert constraint is not None
    answer = walk(COMPILER.compile(constraint), choice(seed))
    assert answer[-1] in (END, OTHER_END)
    json.loads(decode(answer), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    assert len(made) == len(pairs), pairs
    return made


def test_a_deep_schema_takes_no_more_time_than_a_flat_one() -> None:
    schema: dict[str, Any] = {"allOf": [{}] * 20_000}
    for _ in range(26):
        schema = {"allOf": [schema]}
    began = time.thread_time()
    assert close_objects(schema) == schema
    assert time.thread_time() - began < 0.5
