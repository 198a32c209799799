"""Describes a type error in JSON's terms: the field, what is allowed and what was given."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
"""Anchored at the end: a value or key from the sender could look like a path."""
_MISMATCH = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_ENUM = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_PART = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_NAMES = {
    "array": "an array",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_MAX_VALUE = 64


def problem_of(error: msgspec.ValidationError, message_type: Any) -> tuple[str | None, str]:
    """Returns the path of the field at fault, None for the message itself, and a text that begins with it."""
    text = str(error)
    found = _PATH.search(text)
    path, problem = (found[1], text[: found.start()]) if found else ("", text)
    missing = _MISSING.fullmatch(problem)
    if missing:
        path, problem = f"{path}.{missing[1]}".lstrip("."), "is required"
    elif unknown := _UNKNOWN.fullmatch(problem):
        known = ", ".join(_field_names(message_type, path))
        path, problem = f"{path}.{unknown[1][:_MAX_VALUE]}".lstrip("."), f"is not a known field: {known}"
    elif mismatch := _MISMATCH.fullmatch(problem):
        allowed = _choices(message_type, path) or [_NAMES.get(one, one) for one in _alternatives(mismatch[1])]
        problem = f"must be {' or '.join(allowed)}, got {_NAMES.get(mismatch[2], mismatch[2])}"
    elif enum := _ENUM.fullmatch(problem):
        problem = f"must be {' or '.join(_choices(message_type, path))}, got {enum[1][:_MAX_VALUE]}"
    return path or None, f"{path}: {problem}" if path else f"the message {problem}"


def _alternatives(expected: str) -> list[str]:
    """Returns the names of the expected types, without null, which means the same as an absent field."""
    return [one for one in expected.split(" | ") if one != "null"] or ["null"]


def _choices(message_type: Any, path: str) -> list[str]:
    """Returns the values that a field may have if there is a closed set of them."""
    return [repr(value) for one in _types_at(message_type, path) for value in _values(one)]


def _field_names(message_type: Any, path: str) -> list[str]:
    """Returns the names of an object's fields."""
    structs = [one for one in _types_at(message_type, path) if isinstance(one, inspect.StructType)]
    return [field.encode_name for one in structs for field in one.fields]


def _types_at(message_type: Any, path: str) -> list[inspect.Type]:
    """Returns the types that the value at a path may have."""
    nodes = [inspect.type_info(message_type)]
    for part in _PART.findall(path):
        nodes = [child for node in nodes for one in _members(node) for child in _children(one, part)]
    return [one for node in nodes for one in _members(node)]


def _members(node: inspect.Type) -> tuple[inspect.Type, ...]:
    return node.types if isinstance(node, inspect.UnionType) else (node,)


def _children(node: inspect.Type, part: str) -> Iterator[inspect.Type]:
    match node:
        case inspect.StructType():
            yield from (field.type for field in node.fields if field.encode_name == part)
        case inspect.ListType() | inspect.VarTupleType():
            yield node.item_type
        case inspect.DictType():
            yield node.value_type


def _values(node: inspect.Type) -> tuple[object, ...]:
    match node:
        case inspect.LiteralType():
            return tuple(node.values)
        case inspect.EnumType():
            return tuple(one.value for one in node.cls)
    return ()
