"""A strict schema follows OpenAI's rules, and a refusal names the part that breaks them."""

from typing import Any

import pytest

from tests.support.counted_names import CountedName
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.checks.strict_schema import check_strict

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


def holding(inner: Any) -> dict[str, Any]:
    return OBJECT | {"properties": {"a": inner}}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT,
        holding(OBJECT),
        holding({"anyOf": [OBJECT, {"type": "null"}]}),
        holding({"type": "array", "items": OBJECT, "maxItems": 3}),
        holding({"$ref": "#/$defs/A"}) | {"$defs": {"A": OBJECT}},
        holding({"type": "string", "pattern": "^a+$", "enum": ["a", {"allOf": []}]}),
        {"type": "object", "properties": {}, "additionalProperties": False},
    ],
)
def test_one_that_follows_the_rules_is_accepted(schema: dict[str, Any]) -> None:
    check_strict(schema, "s")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"anyOf": [OBJECT]}, "s.type: must be object at the top of a strict schema"),
        ({"type": "array", "items": OBJECT}, "s.type: must be object at the top of a strict schema"),
        (OBJECT | {"additionalProperties": True}, "s.additionalProperties: must be given and false in a strict schema"),
        ({"type": "object"}, "s.additionalProperties: must be given and false in a strict schema"),
        (OBJECT | {"required": []}, "s.required: must have all properties in a strict schema, and 'a' is not there"),
        (OBJECT | {"required": "a"}, "s.required: must have all properties in a strict schema, and 'a' is not there"),
        (
            holding({"anyOf": [{"type": "null"}, {"properties": {}}]}),
            "s.properties.a.anyOf[1].additionalProperties: must be given and false in a strict schema",
        ),
        (
            holding({"items": {"properties": {}}}),
            "s.properties.a.items.additionalProperties: must be given and false in a strict schema",
        ),
        (
            OBJECT | {"$defs": {"A": {"allOf": [OBJECT]}}},
            "s.$defs.A.allOf: is not allowed in a strict schema",
        ),
        (holding({"uniqueItems": True}), "s.properties.a.uniqueItems: is not allowed in a strict schema"),
    ],
)
def test_one_that_breaks_them_is_refused_by_name(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        check_strict(schema, "s")
    assert caught.value.error.message == problem
    assert caught.value.error.param == problem.partition(":")[0]


def test_each_name_is_looked_up_and_not_compared_with_all_others() -> None:
    class Name(CountedName):
        __slots__ = ()

    names = [Name(f"n{number}") for number in range(100)]
    check_strict(OBJECT | {"properties": {one: {} for one in names}, "required": [str(one) for one in names]}, "s")
    assert Name.num_compared <= 2 * len(names)
