"""Prepares tools' schemas for grammars, in which they, or parts of them, are nested in others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from tokenbus.worker.chat_format.parsing.schema import Schema, followed, properties

_COMBINATIONS = ("anyOf", "oneOf", "allOf")


def closed(schema: Schema, *, is_strict: bool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, in which unnamed members are allowed only if it says so explicitly.

    Keywords that can't be compiled are ignored, unless `is_strict`."""
    if isinstance(target := followed(schema, schema), Mapping) and "$ref" in schema:
        schema = {**schema, **target}
        del schema["$ref"]
    others = {"properties": {}, "additionalProperties": _names_more(schema)}
    whole = others | dict(schema) | {"type": "object"}
    return whole if is_strict else with_style(whole, {"lenient": True})


def with_style(schema: Schema, style: Schema) -> dict[str, Any]:
    """Returns a schema with llguidance options; its own take precedence."""
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**style, **own} if isinstance(own, Mapping) else own}


def moved(schema: Schema, place: str) -> dict[str, Any]:
    """Returns a schema whose references to itself remain valid at `place` in another schema."""
    own = schema.get("$id")
    return {key: _moved(one, place, own if isinstance(own, str) else "") for key, one in schema.items() if key != "$id"}


def members(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the members that an object may have, each with a self-contained schema."""
    for key, value in properties(schema).items():
        if isinstance(value, Mapping) or value is True:
            yield key, with_style(_alone(schema, key, {} if value is True else value), schema.get("x-guidance", {}))


def _names_more(schema: Schema) -> bool:
    """Returns whether a schema may name members outside its own `properties`."""
    listed = [schema.get(name) for name in _COMBINATIONS]
    choices = [one for choices in listed if isinstance(choices, list) for one in choices if isinstance(one, Mapping)]
    return "$ref" in schema or any("$ref" in one or "properties" in one for one in choices)


def _alone(schema: Schema, key: str, value: Schema) -> Schema:
    if not _refers(value):
        return value
    pointer = quote(key.replace("~", "~0").replace("/", "~1"), safe="~")
    return {"$ref": f"#/$defs/whole/properties/{pointer}", "$defs": {"whole": moved(schema, "/$defs/whole")}}


def _refers(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, Mapping) and ("$ref" in value or any(map(_refers, value.values())))


def _moved(value: Any, place: str, own_id: str) -> Any:
    if isinstance(value, list):
        return [_moved(one, place, own_id) for one in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _moved(one, place, own_id) for key, one in value.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and (reference := reference.removeprefix(own_id)).partition("/")[0] == "#":
        found["$ref"] = f"#{place}{reference[1:]}"
    return found
