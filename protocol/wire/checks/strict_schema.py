"""Checks schemas that ask to be `strict` by OpenAI's rules: every member is required, and there are no others."""

from collections.abc import Mapping
from typing import Any

from tokenbus.protocol.wire.errors import invalid_field

_UNSUPPORTED = (
    "allOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
)
_HAVE_NAMED = ("properties", "$defs", "definitions")
_HAVE_LIST = ("anyOf", "prefixItems")


def check_strict(schema: Mapping[str, Any], path: str) -> None:
    """Raises RequestError for the first part of a schema that breaks the rules. `path` is its field."""
    if schema.get("type") != "object":
        raise invalid_field(f"{path}.type", "must be object at the top of a strict schema")
    _check(schema, path)


def _check(schema: object, path: str) -> None:
    if not isinstance(schema, Mapping):
        return
    for name in _UNSUPPORTED:
        if name in schema:
            raise invalid_field(f"{path}.{name}", "is not allowed in a strict schema")
    if schema.get("type") == "object" or "properties" in schema:
        _check_object(schema, path)
    for name in _HAVE_NAMED:
        for key, one in _members(schema, name).items():
            _check(one, f"{path}.{name}.{key}")
    for name in _HAVE_LIST:
        choices = schema.get(name)
        for index, one in enumerate(choices if isinstance(choices, list) else []):
            _check(one, f"{path}.{name}[{index}]")
    _check(schema.get("items"), f"{path}.items")


def _check_object(schema: Mapping[str, Any], path: str) -> None:
    if schema.get("additionalProperties") is not False:
        raise invalid_field(f"{path}.additionalProperties", "must be given and false in a strict schema")
    required = schema.get("required")
    names = {one for one in required if isinstance(one, str)} if isinstance(required, list) else set()
    missing = next((key for key in _members(schema, "properties") if key not in names), None)
    if missing is not None:
        raise invalid_field(
            f"{path}.required", f"must have all properties in a strict schema, and {missing!r} is not there"
        )


def _members(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}
