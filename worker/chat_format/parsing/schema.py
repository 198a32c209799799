"""Determines the type of an unquoted value from the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from tokenbus.worker.chat_format.parsing.values import LITERALS

TYPES = {"string", "number", "integer", "boolean", "null", "object", "array"}
MAX_DEPTH = 8
Schema = Mapping[str, Any]
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=float)
"""Also accepts numbers that no float can hold, such as `1e999`."""


def properties(schema: Schema) -> Schema:
    """Returns the schemas of an object's members."""
    whole = followed(schema, schema)
    found = whole.get("properties") if isinstance(whole, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def followed(schema: object, whole: object) -> object:
    """Returns the schema that a part of `whole` refers to, or the part itself if it refers to none in `whole`."""
    for _ in range(MAX_DEPTH):
        place = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(place, str) or not place.startswith("#"):
            return schema
        schema = whole
        for key in place.split("/")[1:]:
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def types_of(schema: object, whole: object = None, depth: int = 0) -> set[str]:
    """Returns the JSON types allowed by a schema, which may be a part of `whole`; an empty set if unspecified."""
    schema = followed(schema, whole)
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
            found = [types_of(one, whole, depth + 1) for one in choices]
            return set().union(*found) if all(found) else set()
    if isinstance(every := schema.get("allOf"), list):
        found = [types for one in every if (types := types_of(one, whole, depth + 1))]
        return set.intersection(*found) if found else set()
    return set()


def is_text(types: set[str]) -> bool:
    """Returns whether a value is always text, whatever it looks like."""
    return types == {"string"}


def to_json(text: str, types: set[str]) -> str:
    """Returns the JSON of an unquoted value: of a type that the schema allows if it can be read as one, else a string
    if that is allowed, else whatever it looks like."""
    value, parsed = _parse(text)
    if parsed and (not types or _type_of(value) in types or (isinstance(value, int) and "number" in types)):
        return msgspec.json.encode(value).decode() if text.strip() in LITERALS else text.strip()
    if not parsed or "string" in types:
        return msgspec.json.encode(text).decode()
    return text.strip()


def _parse(text: str) -> tuple[Any, bool]:
    stripped = text.strip()
    try:
        return _DECODER.decode(LITERALS.get(stripped, stripped)), True
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None, False


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
