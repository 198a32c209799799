"""Closes the objects of a JSON schema: they have only the members that it names, unless it says more.

By the standard, an object may have any members that its schema does not name. A model that is free to add some often
never stops, and repeats those that it has written (decision 0050)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenbus.worker.chat_format.parsing.values import Schema, referred

_ALTERNATIVES = ("anyOf", "oneOf")
_HAVE_ONE = (
    "items",
    "additionalItems",
    "contains",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_HAVE_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_HAVE_LIST = ("prefixItems", "items", "allOf", *_ALTERNATIVES)
_SAY_WHAT_ELSE = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Schema) -> dict[str, Any]:
    """Returns a schema whose objects have only the members that it names, where it says nothing about others.

    Where several schemas describe one object, as in `allOf`, none of them names all of its members; such objects remain
    open."""
    parts = _parts(schema)
    made: dict[str, Any] = _closed(schema, parts)
    return made


def _closed(schema: Any, parts: set[int]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in _HAVE_ONE:
        if isinstance(schema.get(name), Mapping):
            made[name] = _closed(schema[name], parts)
    for name in _HAVE_NAMED:
        if isinstance(schema.get(name), Mapping):
            made[name] = {key: _closed(one, parts) for key, one in schema[name].items()}
    for name in _HAVE_LIST:
        if isinstance(schema.get(name), list):
            made[name] = [_closed(one, parts) for one in schema[name]]
    if "properties" in schema and id(schema) not in parts and not any(name in schema for name in _SAY_WHAT_ELSE):
        made["additionalProperties"] = False
    return made


def _parts(whole: Schema) -> set[int]:
    """Returns the ids of the schemas that describe an object together with others."""
    found: set[int] = set()
    left = [child for one in _all_of(whole) if _is_shared(one) for child in (one, *_in_place(one, whole))]
    while left:
        one = left.pop()
        if id(one) not in found:
            found.add(id(one))
            left += _in_place(one, whole)
    return found


def _is_shared(schema: Schema) -> bool:
    """Returns whether more than one schema names members of the same object."""
    every = schema.get("allOf")
    named = [_names(one) for one in every] if isinstance(every, list) else []
    named += [any(map(_names, schema[name])) for name in _ALTERNATIVES if isinstance(schema.get(name), list)]
    named += ["properties" in schema, "$ref" in schema, "if" in schema, "dependentSchemas" in schema]
    return sum(named) > 1


def _names(schema: object) -> bool:
    """Returns whether a schema may name members of an object."""
    if not isinstance(schema, Mapping):
        return False
    if any(name in schema for name in ("properties", "$ref", "if", "dependentSchemas")):
        return True
    return any(
        isinstance(found := schema.get(name), list) and any(map(_names, found)) for name in (*_ALTERNATIVES, "allOf")
    )


def _in_place(schema: Schema, whole: Schema) -> list[Schema]:
    """Returns the schemas that describe the same value as this one."""
    found = [one for name in (*_ALTERNATIVES, "allOf") if isinstance(schema.get(name), list) for one in schema[name]]
    if isinstance(reference := schema.get("$ref"), str):
        found.append(referred(reference, whole))
    return [one for one in found if isinstance(one, Mapping)]


def _all_of(schema: object) -> Iterator[Schema]:
    """Yields a schema and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name in _HAVE_ONE:
        yield from _all_of(schema.get(name))
    for name in _HAVE_NAMED:
        if isinstance(schema.get(name), Mapping):
            for one in schema[name].values():
                yield from _all_of(one)
    for name in _HAVE_LIST:
        if isinstance(schema.get(name), list):
            for one in schema[name]:
                yield from _all_of(one)
