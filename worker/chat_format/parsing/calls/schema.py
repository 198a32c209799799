"""Decides by the schema of a tool what a value without quotes is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.worker.chat_format.parsing.calls.values import LITERALS

TYPES = {"string", "number", "integer", "boolean", "null", "object", "array"}
MAX_DEPTH = 8
Schema = Mapping[str, Any]


def types_of(schema: object, depth: int = 0) -> set[str]:
    """Returns the JSON types a schema allows; an empty set if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared} & TYPES
    if isinstance(declared, list):
        return {one for one in declared if isinstance(one, str)} & TYPES
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    for choice in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(choice), list):
            found = [types_of(one, depth + 1) for one in choices]
            return set().union(*found) if all(found) else set()
    if isinstance(every := schema.get("allOf"), list):
        found = [types for one in every if (types := types_of(one, depth + 1))]
        return set.intersection(*found) if found else set()
    return set()


def is_text(types: set[str]) -> bool:
    """Returns whether a value is text whatever it looks like."""
    return types == {"string"}


def to_json(text: str, types: set[str]) -> str:
    """Returns the JSON of a value that was written without quotes: of a type the schema allows if it can be read as
    one, or else a string if that is allowed, or else whatever it looks like."""
    value, parsed = _parse(text)
    if parsed and (not types or _type_of(value) in types or (isinstance(value, int) and "number" in types)):
        return msgspec.json.encode(value).decode() if text.strip() in LITERALS else text.strip()
    if not parsed or "string" in types:
        return msgspec.json.encode(text).decode()
    return text.strip()


def _parse(text: str) -> tuple[Any, bool]:
    stripped = text.strip()
    try:
        return msgspec.json.decode(LITERALS.get(stripped, stripped)), True
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None, False


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
