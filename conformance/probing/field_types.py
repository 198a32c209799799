"""Types for the fields of raw messages. null means absent, and integral floats count as integers."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from tokenbus.conformance.probing.assertions import BrokenError, shorten


class FieldType(NamedTuple):
    """A field's type, with a name for error messages."""

    name: str
    holds: Callable[[object], bool]


Schema = dict[str, FieldType]


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and value >= 0 and value == int(value)


COUNT = FieldType("an integer >= 0", _is_count)
POSITIVE = FieldType("an integer > 0", lambda value: _is_count(value) and value != 0)
DURATION = FieldType("a number >= 0", lambda value: isinstance(value, int | float) and _is_number(value) and value >= 0)
NUMBER = FieldType("a number", _is_number)
TEXT = FieldType("a string", lambda value: isinstance(value, str))
NAME = FieldType("a non-empty string", lambda value: isinstance(value, str) and value != "")
FLAG = FieldType("a boolean", lambda value: isinstance(value, bool))
BYTES = FieldType("bytes", lambda value: isinstance(value, bytes))
MAP = FieldType("a map", lambda value: isinstance(value, dict))


def optional(kind: FieldType) -> FieldType:
    return FieldType(f"{kind.name}, or absent", lambda value: value is None or kind.holds(value))


def list_of(kind: FieldType) -> FieldType:
    def holds(value: object) -> bool:
        return isinstance(value, list) and all(kind.holds(item) for item in value)

    return FieldType(f"a list with each item {kind.name}", holds)


def starting_with(kind: FieldType) -> FieldType:
    """Returns the type of arrays whose first item is of a type."""
    return FieldType(
        f"an array of {kind.name} and more",
        lambda value: bool(isinstance(value, list) and value and kind.holds(value[0])),
    )


def one_of(*values: object) -> FieldType:
    return FieldType(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def matching(pattern: str) -> FieldType:
    whole = re.compile(pattern)
    return FieldType(f"a string like {pattern}", lambda value: isinstance(value, str) and bool(whole.fullmatch(value)))


def map_of(schema: Schema) -> FieldType:
    """Returns the type of maps that follow a schema. For whole messages use `check`, which names the wrong field."""

    def holds(value: object) -> bool:
        return isinstance(value, dict) and all(kind.holds(value.get(name)) for name, kind in schema.items())

    return FieldType("a map of " + ", ".join(schema), holds)


def check(message: object, schema: Schema, where: str) -> None:
    """Raises BrokenError naming the first field of a wrong type. Fields not in the schema may hold anything."""
    if not isinstance(message, dict):
        raise BrokenError(f"{where} is {shorten(message)}, not a map")
    for name, kind in schema.items():
        if not kind.holds(message.get(name)):
            raise BrokenError(f"{where}: {name} is {shorten(message.get(name))}, not {kind.name}")
