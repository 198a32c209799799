"""A value of a wrong type is refused in words that say which field it is, what it may be, and what it was."""

import enum
from typing import Any, Literal

import msgspec
import pytest

from tokenbus.protocol.wire import codec


class _Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class _Leaf(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["a", "b"]
    size: int | None = None


class _Tree(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    scale: float | None = None
    colour: _Colour | None = None
    leaves: list[_Leaf] | str | None = None
    by_name: dict[str, _Leaf] | None = None
    is_old: bool | None = None


class _Size(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    colour: str | None = None
    size: int | None = None


class _Sized(msgspec.Struct, frozen=True, kw_only=True):
    inner: _Size | None = None


def problem(value: object) -> tuple[str | None, str]:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, _Tree, str_keys=True)
    return codec.problem_of(caught.value, _Tree)


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ([], None, "the message must be an object, got an array"),
        (None, None, "the message must be an object, got null"),
        ({"name": 5}, "name", "name: must be a string, got an integer"),
        ({"scale": True}, "scale", "scale: must be a number, got a boolean"),
        ({"is_old": "yes"}, "is_old", "is_old: must be a boolean, got a string"),
        ({"leaves": {}}, "leaves", "leaves: must be a string or an array, got an object"),
        ({"leaves": [5]}, "leaves[0]", "leaves[0]: must be an object, got an integer"),
        ({"leaves": [{}]}, "leaves[0].kind", "leaves[0].kind: is required"),
        ({"leaves": [{"kind": "c"}]}, "leaves[0].kind", "leaves[0].kind: must be 'a' or 'b', got 'c'"),
        ({"leaves": [{"kind": 5}]}, "leaves[0].kind", "leaves[0].kind: must be 'a' or 'b', got an integer"),
        ({"by_name": {"x": {"kind": "c"}}}, "by_name[...].kind", "by_name[...].kind: must be 'a' or 'b', got 'c'"),
        ({"colour": "green"}, "colour", "colour: must be 'red' or 'blue', got 'green'"),
    ],
)
def test_the_field_what_is_allowed_and_what_was_given_are_said(value: Any, path: str | None, text: str) -> None:
    assert problem(value) == (path, text)


def test_a_long_value_is_not_repeated() -> None:
    _, text = problem({"colour": "x" * 1_000_000})
    assert len(text) < 200


def test_a_value_that_looks_like_a_path_is_none() -> None:
    path, _ = problem({"colour": "x` - at `$.name"})
    assert path == "colour"


def test_an_unknown_field_of_an_object_that_allows_none_is_named_with_those_that_are_known() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"inner": {"colr": 1}}, _Sized)
    path, text = codec.problem_of(raised.value, _Sized)
    assert (path, text) == ("inner.colr", "inner.colr: is not a known field: colour, size")
