"""Closes the objects of a JSON schema: they have only the members that it names, unless it says more.

By the standard, an object may have any members that its schema does not name. A model that is free to add some often
never stops, and repeats those that it has written (decision 0050)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenbus.worker.chat_format.parsing.schemas import Schema, referred

_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINATIONS = ("allOf", *_ALTERNATIVES)
_HAVE_ONE = frozenset(
    {"items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"}
)
_HAVE_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_HAVE_LIST = frozenset({"prefixItems", "items", *_COMBINATIONS})
_NAME_MEMBERS = frozenset({"properties", "$ref", "if", "dependentSchemas"})
_SAY_WHAT_ELSE = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Schema) -> dict[str, Any]:
    """Returns a schema whose objects have only the members that it names, where it says nothing about others.

    Where several schemas describe one object, as in `allOf`, none of them names all of its members; such objects remain
    open. An event loop waits for this, so each part is looked at a few times, however deep it is."""
    parts = _parts(schema)
    made: dict[str, Any] = _closed(schema, parts)
    return made


def _closed(schema: Any, parts: set[int]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name, value in schema.items():
        if isinstance(value, dict):
            if name in _HAVE_ONE:
                made[name] = _closed(value, parts)
            elif name in _HAVE_NAMED:
                made[name] = {key: _closed(one, parts) for key, one in value.items()}
        elif isinstance(value, list) and name in _HAVE_LIST:
            made[name] = [_closed(one, parts) for one in value]
    if "properties" in schema and id(schema) not in parts and not any(name in schema for name in _SAY_WHAT_ELSE):
        made["additionalProperties"] = False
    return made


def _parts(whole: Schema) -> set[int]:
    """Returns the ids of the schemas that describe an object together with others."""
    found: set[int] = set()
    every = _all_of(whole)
    naming = _naming(every)
    left = [child for one in every if _is_shared(one, naming) for child in (one, *_in_place(one, whole))]
    while left:
        one = left.pop()
        if id(one) not in found:
            found.add(id(one))
            left += _in_place(one, whole)
    return found


def _is_shared(schema: Schema, naming: set[int]) -> bool:
    """Returns whether more than one schema names members of the same object."""
    count = sum(name in schema for name in _NAME_MEMBERS)
    for name in _COMBINATIONS:
        if isinstance(listed := schema.get(name), list):
            named = sum(id(one) in naming for one in listed)
            count += named if name == "allOf" else min(named, 1)
    return count > 1


def _naming(every: list[Schema]) -> set[int]:
    """Returns the ids of the schemas that may name members of an object, of all schemas in one."""
    found: set[int] = set()
    for schema in reversed(every):  # what is in a schema stands behind it
        if not _NAME_MEMBERS.isdisjoint(schema) or any(
            id(one) in found for name in _COMBINATIONS if isinstance(listed := schema.get(name), list) for one in listed
        ):
            found.add(id(schema))
    return found


def _in_place(schema: Schema, whole: Schema) -> list[Schema]:
    """Returns the schemas that describe the same value as this one."""
    found = [one for name in _COMBINATIONS if isinstance(schema.get(name), list) for one in schema[name]]
    if isinstance(reference := schema.get("$ref"), str):
        found.append(referred(reference, whole))
    return [one for one in found if isinstance(one, Mapping)]


def _all_of(whole: Schema) -> list[Schema]:
    """Returns a schema and all schemas in it, each before those in it."""
    found: list[Schema] = []
    left: list[Any] = [whole]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        found.append(schema)
        for name, value in schema.items():
            if isinstance(value, dict):
                if name in _HAVE_ONE:
                    left.append(value)
                elif name in _HAVE_NAMED:
                    left += value.values()
            elif isinstance(value, list) and name in _HAVE_LIST:
                left += value
    return found
