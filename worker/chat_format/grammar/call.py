"""Writes the grammar of one call, after the marker that opens it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenbus.worker.chat_format.grammar.lark import LarkWriter, json_of, literal
from tokenbus.worker.chat_format.grammar.schemas import members, moved, with_style
from tokenbus.worker.chat_format.grammar.values import any_order, bare_object, texts_of, value_of
from tokenbus.worker.chat_format.parsing.schema import types_of
from tokenbus.worker.contract.chat_format import Calls, Kind, Values

_PLACE = re.compile(r"(\{name\}|\{id\}|\{index\})")


class CallWriter:
    """Writes the calls of one format."""

    def __init__(self, lark: LarkWriter, calls: Calls) -> None:
        self._lark = lark
        self._calls = calls

    def __repr__(self) -> str:
        return f"<CallWriter {self._calls.kind}>"

    def write(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """Adds a rule for one tool's calls, and returns its name. `schema` describes the tool's arguments."""
        calls, lark = self._calls, self._lark
        if calls.kind is Kind.JSON:
            body = json_of(self._whole(name, schema))
        else:
            head = f"{self._header(name)} {lark.marker(calls.name_close)}"
            if calls.kind is Kind.TAGGED:
                body = f"{head} {self._arguments(rule, schema)}"
            elif calls.values is Values.JSON:
                body = f"{head} {json_of(schema)}"
            else:
                body = f"{head} {bare_object(lark, calls, rule, schema)}"
        return lark.add(rule, f"{body} {lark.marker(calls.call_close)}".strip())

    def _whole(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the schema of a JSON call's object."""
        calls = self._calls
        key = calls.arguments_key if calls.name_key else name
        parts: dict[str, Any] = {calls.name_key: {"const": name}} if calls.name_key else {}
        parts[key] = moved(schema, f"/properties/{key}")
        if calls.id_key:
            length = calls.id_length
            parts[calls.id_key] = {"type": "string", "pattern": f"^[A-Za-z0-9]{{{length or 1},{length or 64}}}$"}
        whole = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        return with_style(whole, schema.get("x-guidance", {}))

    def _header(self, name: str) -> str:
        length = self._calls.id_length
        places = {
            "{name}": literal(name),
            "{id}": f"/[A-Za-z0-9]{{{length}}}/" if length else "/[A-Za-z0-9_.:-]{1,64}/",
            "{index}": "/[0-9]{1,4}/",
        }
        return " ".join(places.get(one) or self._lark.marker(one) for one in _PLACE.split(self._calls.header) if one)

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns an expression for tagged arguments. Models write them in varying order, so any order is accepted."""
        names = {
            key: self._lark.add(f"{rule}_{number}", self._argument(key, value, f"{rule}_{number}"))
            for number, (key, value) in enumerate(members(schema))
        }
        other = ""
        if schema.get("additionalProperties"):
            other = self._lark.add(f"{rule}_other", self._argument(None, {}, f"{rule}_other"))
        return any_order(self._lark, rule, names, other, schema, self._calls.argument_separator)

    def _argument(self, key: str | None, schema: Mapping[str, Any], rule: str) -> str:
        calls, lark = self._calls, self._lark
        name = r"/[A-Za-z0-9_.-]{1,64}/" if key is None else literal(_escaped(key) if calls.keys_escaped else key)
        head = f"{lark.marker(calls.argument_open)} {name} {lark.marker(calls.key_close)}"
        return f"{head} {self._typed(schema, rule) if calls.type_close else self._value(schema)}"

    def _typed(self, schema: Mapping[str, Any], rule: str) -> str:
        """Returns an expression for the type of a value, and the value."""
        calls, types = self._calls, types_of(schema, schema)
        close = self._lark.marker(calls.type_close)
        text = f"{literal(calls.string_type)} {close} {self._string(schema)}"
        other_type = '"false"' if calls.string_type == "true" else "/[a-z]{1,16}/"
        other = f"{other_type} {close} {json_of(schema)} {self._lark.marker(calls.value_close)}"
        if types == {"string"}:
            return text
        if types and "string" not in types:
            return other
        return f"({self._lark.add(f'{rule}_text', text)} | {self._lark.add(f'{rule}_json', other)})"

    def _value(self, schema: Mapping[str, Any]) -> str:
        """Returns an expression for a value and its closing marker."""
        calls, types = self._calls, types_of(schema, schema)
        close = self._lark.marker(calls.value_close)
        if calls.values is Values.TEXT and ("string" in types or not types):
            return self._string(schema)
        if calls.values in (Values.TEXT, Values.JSON):
            return f"{json_of(schema)} {close}".strip()
        return f"{value_of(self._lark, calls, schema)} {close}".strip()

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Returns an expression for a raw string and its closing marker."""
        texts = texts_of(schema)
        if texts:
            return self._lark.texts_until(texts, self._calls.value_close)
        return self._lark.text_until(self._calls.value_close)


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
