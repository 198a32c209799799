"""Reads what a tool's JSON schema says about the tool's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 8
_UNKNOWN: frozenset[str] = frozenset()


class SchemaReader:
    """Reads the parts of one schema.

    An event loop waits for this, and clients write the schema: so each part is read once, however many others refer to
    it. Eight lists of alternatives, each with ten references to the next one, would take hours."""

    def __init__(self, whole: Schema) -> None:
        self.whole = whole
        self._places: dict[str, object] = {}
        """The part at each place that is referred to."""
        self._types: dict[tuple[int, int], frozenset[str]] = {}
        """By the id of a part, which lives as long as the whole does, and its depth."""
        self._texts: dict[int, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"<SchemaReader of {len(self.properties)} properties>"

    @cached_property
    def properties(self) -> Schema:
        """The schemas of an object's members."""
        whole = self.followed(self.whole)
        found = whole.get("properties") if isinstance(whole, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def followed(self, part: object) -> object:
        """Returns the schema that a part refers to, or the part itself if it refers to none in the whole."""
        for _ in range(_MAX_DEPTH):
            place = part.get("$ref") if isinstance(part, Mapping) else None
            if not isinstance(place, str) or not place.startswith("#"):
                return part
            if place not in self._places:
                self._places[place] = referred(place, self.whole)
            part = self._places[place]
        return None

    def types_of(self, part: object, depth: int = 0) -> frozenset[str]:
        """Returns the JSON types allowed by a part of the whole; an empty set if unspecified."""
        schema = self.followed(part)
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _UNKNOWN
        key = id(schema), depth
        if key not in self._types:
            self._types[key] = self._types_of(schema, depth)
        return self._types[key]

    def texts_of(self, part: object) -> tuple[str, ...]:
        """Returns the texts allowed by a part of the whole, if it lists them."""
        schema = self.followed(part)
        listed = schema.get("enum") if isinstance(schema, Mapping) else None
        if not isinstance(listed, list):
            return ()
        if id(listed) not in self._texts:
            are_texts = all(isinstance(one, str) and one for one in listed)
            self._texts[id(listed)] = tuple(listed) if are_texts else ()
        return self._texts[id(listed)]

    def _types_of(self, schema: Schema, depth: int) -> frozenset[str]:
        declared = schema.get("type")
        if isinstance(declared, str):
            return TYPES & {declared}
        if isinstance(declared, list):
            return TYPES & {one for one in declared if isinstance(one, str)}
        if isinstance(values := schema.get("enum"), list):
            return frozenset(map(type_of, values))
        if "const" in schema:
            return frozenset({type_of(schema["const"])})
        for choice in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(choice), list):
                found = {self.types_of(one, depth + 1) for one in choices}
                return _UNKNOWN.union(*found) if all(found) else _UNKNOWN
        if isinstance(every := schema.get("allOf"), list):
            found = {types for one in every if (types := self.types_of(one, depth + 1))}
            return frozenset.intersection(*found) if found else _UNKNOWN
        return _UNKNOWN


def referred(place: str, whole: object) -> object:
    """Returns the part of `whole` at a place such as `#/$defs/Name`; None if there is none."""
    if not place.startswith("#"):
        return None
    for key in place.split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        whole = whole.get(key) if isinstance(whole, Mapping) else None
    return whole


def type_of(value: object) -> str:
    """Returns the JSON type of a value."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
