"""Writes rules in llguidance's Lark dialect: markers, free text closed by a marker, and JSON by tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from tokenbus.worker.chat_format.closed_objects import close_objects
from tokenbus.worker.chat_format.parsing.schemas import Schema, SchemaReader

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as templates write it. A model that is free to write whitespace may never stop."""


_MAX_CHARS = 2_000_000
"""A compiled grammar takes about 30 bytes for each character, and a second for a million."""


class GrammarError(ValueError):
    """Calls in this format can't be constrained."""


class LarkWriter:
    """Collects the rules of one grammar. `tokens` are the ids of markers that are single tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._until: dict[str, str] = {}
        self._texts: dict[tuple[tuple[str, ...], str], str] = {}
        self._size = 0
        special = sorted(tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    def __repr__(self) -> str:
        return f"<LarkWriter {len(self._rules)} rules>"

    def __contains__(self, rule: str) -> bool:
        return rule in self._rules

    def add(self, name: str, body: str) -> str:
        """Adds a rule and returns its name. Raises GrammarError if the grammar becomes too large."""
        self._rules[name] = body
        self._size += len(body)
        if self._size > _MAX_CHARS:
            raise GrammarError(f"take more than {_MAX_CHARS:,} characters as a grammar")
        return name

    def write(self, start: str) -> str:
        """Returns the grammar with a start rule and all added rules."""
        rules = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\n]{0,4}/"])

    def marker(self, text: str) -> str:
        """Returns an expression for a marker: its tokens by id, and the texts between them."""
        return " ".join(
            f"<[{self._tokens[one]}]>" if one in self._tokens else literal(one) for one in self._split(text)
        )

    def text_until(self, marker: str) -> str:
        """Returns an expression for any text up to and including the next marker. Raises GrammarError for an empty
        marker."""
        first, *rest = self._split(marker.lstrip()) or [""]
        if not first:
            raise GrammarError("text that nothing closes can't be told from what follows")
        if first in self._tokens:
            return f"TEXT {self.marker(marker.lstrip())}"
        # a lazy rule ends with the first text that matches
        if first not in self._until:
            self._until[first] = name = f"until_{len(self._until)}"
            self.add(f"{name}[lazy]", f"TEXT {literal(first)}")
        return f"{self._until[first]} {self.marker(''.join(rest))}".strip()

    def texts_until(self, texts: tuple[str, ...], marker: str) -> str:
        """Returns an expression for one of several texts and the marker after it.

        The texts are one terminal: in a rule, each of a thousand or more would be a parser item. A terminal matches
        greedily, so it includes the text with which the marker begins."""
        first, *rest = self._split(marker) or [""]
        if first in self._tokens:
            first, rest = "", [first, *rest]
        key = texts, first
        if key not in self._texts:
            body = f"{one_of(texts)} {literal(first)}" if first else one_of(texts)
            self._texts[key] = self.add(f"TEXTS_{len(self._texts)}", body)
        return f"{self._texts[key]} {self.marker(''.join(rest))}".strip()

    def _split(self, text: str) -> list[str]:
        return [one for one in (self._special.split(text) if self._special else [text]) if one]


def literal(text: str) -> str:
    """Returns an expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def one_of(texts: Sequence[str]) -> str:
    """Returns an expression for one of several texts."""
    return f"({' | '.join(map(literal, texts))})"


def json_of(schema: Mapping[str, Any]) -> str:
    """Returns an expression for the JSON of a value."""
    return f"%json {json.dumps(with_style(schema, _JSON_STYLE), ensure_ascii=False)}"


def joined(first: str, second: str) -> str:
    """Joins two markers, merging the whitespace where they meet."""
    edge = first[len(first.rstrip()) :] if second[:1].isspace() else ""
    return first.removesuffix(edge) + second if edge else first + second


_COMBINATIONS = ("anyOf", "oneOf", "allOf")


def closed(schema: Schema, *, is_strict: bool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, in which unnamed members are allowed only if it says so explicitly.

    Keywords that can't be compiled are ignored, unless `is_strict`."""
    schema = close_objects(schema)
    if isinstance(target := SchemaReader(schema).followed(schema), Mapping) and "$ref" in schema:
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


class MemberSchema(NamedTuple):
    """The schema of one of an object's members, and what it says."""

    alone: Mapping[str, Any] = {}
    """The member's schema, self-contained."""
    types: frozenset[str] = frozenset()
    """The JSON types that are allowed; empty if unspecified."""
    texts: tuple[str, ...] = ()
    """The allowed texts, if they are listed."""


def members(schema: Schema) -> Iterator[tuple[str, MemberSchema]]:
    """Yields the members that an object may have, by key."""
    named = SchemaReader(schema).properties
    whole: Schema = moved(schema, _WHOLE) if _refers(list(named.values())) else schema
    reader = SchemaReader({"$defs": {"whole": whole}})
    for key, value in named.items():
        if isinstance(value, Mapping) or value is True:
            part = whole["properties"][key]
            alone = with_style(_alone(whole, key, {} if value is True else value), schema.get("x-guidance", {}))
            yield key, MemberSchema(alone, reader.types_of(part), reader.texts_of(part))


def _names_more(schema: Schema) -> bool:
    """Returns whether a schema may name members outside its own `properties`."""
    listed = [schema.get(name) for name in _COMBINATIONS]
    choices = [one for choices in listed if isinstance(choices, list) for one in choices if isinstance(one, Mapping)]
    return "$ref" in schema or any("$ref" in one or "properties" in one for one in choices)


_WHOLE = "/$defs/whole"


def _alone(whole: Schema, key: str, value: Schema) -> Schema:
    if not _refers(value):
        return value
    pointer = quote(key.replace("~", "~0").replace("/", "~1"), safe="~")
    return {"$ref": f"#{_WHOLE}/properties/{pointer}", "$defs": {"whole": whole}}


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
