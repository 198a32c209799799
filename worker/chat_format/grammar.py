"""Writes the grammar of an answer with tool calls, in llguidance's Lark, out of a chat format and the tools; pure.

With `auto`, text is free until the marker that opens a call; from there on, everything is as the format and the tool's
schema want it. With `required`, or with one tool that must be called, the answer is calls alone, behind the reasoning:

    auto        reasoning?  free text  (opening marker  calls)?
    required    reasoning?  opening marker  calls

Markers that are tokens of their own are written as token ids, so that no text can be taken for them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenbus.worker.chat_format.chat_format import Calls, ChatFormat, Kind, Values
from tokenbus.worker.chat_format.parsing.calls.schema import types_of

Tools = Mapping[str, Mapping[str, Any]]

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""As templates write JSON. Whitespace that a model is free to write can go on for ever."""
_MAX_COUNTED = 6
_PLACE = re.compile(r"(\{name\}|\{id\}|\{index\})")
_LITERALS = {
    Values.PYTHON: {"boolean": ("True", "False"), "null": ("None",)},
    Values.BARE_KEYS: {"boolean": ("true", "false"), "null": ("null",)},
}


class GrammarError(ValueError):
    """Calls of this format can't be constrained."""


def calls_grammar(
    form: ChatFormat,
    tools: Tools,
    *,
    is_required: bool,
    parallel: bool = True,
    in_reasoning: bool = False,
    content: Mapping[str, Any] | None = None,
) -> str:
    """Returns the grammar of an answer that may call these tools, or that must, if `is_required`.

    `parallel`: it may have more than one call. `in_reasoning`: it begins inside the reasoning. `content`: the JSON
    schema of an answer without calls. Raises GrammarError."""
    if form.calls is None or not tools:
        raise GrammarError("the model's chat format has no tool calls")
    calls = _closed_calls(form.calls, parallel=parallel)
    return _Writer(form, calls, tools, is_required=is_required, content=content).write(in_reasoning)


def reasoning_grammar(form: ChatFormat, *, in_reasoning: bool) -> str:
    """Returns the grammar of reasoning, if the model may have some, and of `@body` behind it; empty if it has none."""
    if form.channels is not None:
        writer = _Writer(form, Calls(kind=Kind.JSON), {}, is_required=False, content=None)
        return writer.write_with(writer.messages_before("@body"))
    if form.reasoning is None:
        return ""
    writer = _Writer(form, Calls(kind=Kind.JSON), {}, is_required=False, content=None)
    content_open = f"(SPACE {writer.marker(form.content_open.strip())})? " if form.content_open else ""
    return writer.write_with(f"{writer.reasoning(in_reasoning)} {content_open}@body")


def _closed_calls(calls: Calls, *, parallel: bool) -> Calls:
    return calls if parallel else msgspec.structs.replace(calls, parallel=False)


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(
        self, form: ChatFormat, calls: Calls, tools: Tools, *, is_required: bool, content: Mapping[str, Any] | None
    ) -> None:
        self._form = form
        self._calls = calls
        self._free = "TEXT" if content is None else _json(content)
        """What the answer is if no call is made."""
        self._tools = {name: _closed(schema) for name, schema in tools.items()}
        self._is_required = is_required
        self._rules: list[str] = []
        self._until: dict[str, str] = {}
        special = sorted(form.tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    def write(self, in_reasoning: bool) -> str:
        if self._form.channels is not None:
            return self.write_with(self._messages())
        start = f"{self.reasoning(in_reasoning)} content"
        self._add("content", self._content())
        return self.write_with(start)

    def write_with(self, start: str) -> str:
        """Returns the grammar with a start rule and all rules that were added."""
        return "\n".join(
            ["%llguidance {}", f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\n]{0,4}/"]
        )

    def _add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    # markers

    def marker(self, text: str) -> str:
        """Returns what matches a marker: its tokens by their ids, and the texts between them."""
        pieces = self._special.split(text) if self._special else [text]
        known = self._form.tokens
        return " ".join(f"<[{known[one]}]>" if one in known else _literal(one) for one in pieces if one)

    def _text_until(self, marker: str) -> str:
        """Returns what matches any text up to the next marker, and the marker."""
        stripped = marker.lstrip()
        if not stripped:
            raise GrammarError("text that nothing closes can't be told from what follows")
        pieces = [one for one in (self._special.split(stripped) if self._special else [stripped]) if one]
        if pieces[0] in self._form.tokens:
            return f"TEXT {self.marker(stripped)}"
        # a lazy rule ends with the first text that matches
        if pieces[0] not in self._until:
            self._until[pieces[0]] = self._add(f"until_{len(self._until)}[lazy]", f"TEXT {_literal(pieces[0])}")
        rest = self.marker("".join(pieces[1:]))
        return f"{self._until[pieces[0]].removesuffix('[lazy]')} {rest}".strip()

    # the answer

    def reasoning(self, is_open: bool) -> str:
        reasoning = self._form.reasoning
        if reasoning is None:
            return ""
        if is_open:
            return self._text_until(reasoning.close) + " SPACE"
        if not reasoning.open.strip():
            return ""
        opening = self.marker(reasoning.open.strip())
        return f"(SPACE {opening} {self._text_until(reasoning.close)} SPACE)?"

    def _content(self) -> str:
        calls = self._calls
        announce = f"({self.marker(calls.announce.strip())})? " if calls.announce else ""
        opening = _joined(calls.section_open, calls.call_open)
        first = calls.section_open or calls.call_open
        is_bare = first.strip() in ("", "[")
        marked = "[" if is_bare and first else ""
        all_calls = self._all_calls()
        closing = f" ({self.marker(calls.announce_close.strip())})?" if calls.announce_close else ""
        content_open = f"(SPACE {self.marker(self._form.content_open.strip())})? " if self._form.content_open else ""
        if self._is_required:
            return f"{announce}{self.marker(opening.lstrip())} {all_calls}{closing}"
        if self._free != "TEXT":
            return f"{content_open}{self._free} | {announce}{self.marker(opening.lstrip())} {all_calls}{closing}"
        if is_bare:
            free = self._add("FREE", rf"/\s*[^\s{re.escape(marked or '{')}](.|\n)*/")
            return f"{announce}{self.marker(opening)} {all_calls}{closing} | {free} | SPACE"
        return f"{content_open}TEXT | {content_open}{self._text_until(opening)} {all_calls}{closing}"

    def _all_calls(self) -> str:
        """Returns what matches all calls of an answer behind the marker that opens the first one."""
        calls = self._calls
        self._add("call", " | ".join(self._call(number, name) for number, name in enumerate(self._tools)))
        more = f" ({self.marker(_joined(calls.separator, calls.call_open))} call)*" if calls.parallel else ""
        return f"call{more} {self.marker(calls.section_close)}".strip()

    def messages_before(self, last: str) -> str:
        """Returns what matches messages with headers: any number of them before the last one, whose body is `last`."""
        channels = self._form.channels
        assert channels is not None
        channel, body = self.marker(channels.channel), self.marker(channels.body)
        end, start = self.marker(channels.ends[0]), self.marker(channels.start)
        kinds = " | ".join(_literal(name) for name in (*channels.reasoning, *channels.content))
        self._add("message", f"{channel} ({kinds}) {body} TEXT {end} {start}")
        final = " | ".join(_literal(name) for name in channels.content)
        self._add("answer", f"{channel} ({final}) {body} {last}")
        return "message* answer"

    def _messages(self) -> str:
        """Returns what matches an answer that consists of messages with headers."""
        channels = self._form.channels
        assert channels is not None
        answer = self.messages_before(self._free)
        constrain = f'{_literal(" ")} {self.marker(channels.constrain)} "json"' if channels.constrain else ""
        bodies = []
        for name, schema in self._tools.items():
            header = _literal(f"{channels.content[-1]}{channels.recipient}{channels.function}{name}")
            head = f"{self.marker(channels.channel)} {header} {constrain} {self.marker(channels.body)}"
            bodies.append(f"{head} {_json(schema)}")
        self._add("call", " | ".join(bodies))
        return "message* call" if self._is_required else f"{answer} | message* call"

    # one call, behind its opening marker

    def _call(self, number: int, name: str) -> str:
        calls, schema = self._calls, self._tools[name]
        rule = f"call_{number}"
        match calls.kind:
            case Kind.JSON:
                body = _json(self._whole(name, schema))
            case Kind.NAMED if calls.values is Values.JSON:
                body = f"{self._header(name)} {self.marker(calls.name_close)} {_json(schema)}"
            case Kind.NAMED:
                body = f"{self._header(name)} {self.marker(calls.name_close)} {self._object(rule, schema)}"
            case Kind.TAGGED:
                arguments = self._arguments(rule, schema)
                body = f"{self._header(name)} {self.marker(calls.name_close)} {arguments}"
        return self._add(rule, f"{body} {self.marker(calls.call_close)}".strip())

    def _whole(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the schema of the object that a JSON call is."""
        calls = self._calls
        arguments = dict(schema)
        if not calls.name_key:
            members: dict[str, Any] = {name: arguments}
        else:
            members = {calls.name_key: {"const": name}, calls.arguments_key: arguments}
        if calls.id_key:
            length = calls.id_length
            members[calls.id_key] = {"type": "string", "pattern": f"^[A-Za-z0-9]{{{length or 1},{length or 64}}}$"}
        return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}

    def _header(self, name: str) -> str:
        length = self._calls.id_length
        places = {
            "{name}": _literal(name),
            "{id}": f"/[A-Za-z0-9]{{{length}}}/" if length else "/[A-Za-z0-9_.:-]{1,64}/",
            "{index}": "/[0-9]{1,4}/",
        }
        return " ".join(places.get(one) or self.marker(one) for one in _PLACE.split(self._calls.header) if one)

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns what matches tagged arguments. Models write them in an order of their own, so any order counts."""
        calls = self._calls
        known = {key: value for key, value in _properties(schema).items() if isinstance(value, Mapping)}
        names = {
            key: self._add(f"{rule}_{number}", self._argument(key, value, f"{rule}_{number}"))
            for number, (key, value) in enumerate(known.items())
        }
        other = ""
        if schema.get("additionalProperties"):
            other = self._add(f"{rule}_other", self._argument(None, {}, f"{rule}_other"))
        return self._any_order(rule, names, other, schema, calls.argument_separator)

    def _any_order(
        self, rule: str, members: Mapping[str, str], other: str, schema: Mapping[str, Any], separator: str
    ) -> str:
        """Returns what matches members, by key, in any order, all required ones among them. `other` may come often.

        A rule for each set of members that are still to come, up to 64 sets: members beyond that are not counted."""
        required = schema.get("required") if isinstance(schema.get("required"), Sequence) else ()
        counted = sorted(members, key=lambda key: key not in (required or ()))[:_MAX_COUNTED]
        free = [name for key, name in members.items() if key not in counted] + [other] * bool(other)
        between = f"{_literal(separator)} " if separator else ""

        def rest(left: tuple[str, ...]) -> str:
            return f"{rule}_args_{sum(1 << counted.index(key) for key in left)}"

        def choices(left: tuple[str, ...], before: str) -> str:
            found = [f"{before}{members[key]} {rest(tuple(one for one in left if one != key))}" for key in left]
            found += [f"{before}{name} {rest(left)}" for name in free]
            if not any(key in (required or ()) for key in left):
                found.append('""')
            return " | ".join(found)

        for size in range(len(counted) + 1):
            for left in itertools.combinations(counted, size):
                self._add(rest(left), choices(left, between))
        return self._add(f"{rule}_args", choices(tuple(counted), ""))

    def _argument(self, key: str | None, schema: Mapping[str, Any], rule: str) -> str:
        calls = self._calls
        name = r"/[A-Za-z0-9_.-]{1,64}/" if key is None else _literal(_escaped(key) if calls.keys_escaped else key)
        types = types_of(schema)
        head = f"{self.marker(calls.argument_open)} {name} {self.marker(calls.key_close)}"
        if calls.type_close:
            return f"{head} {self._typed(types, schema, rule)}"
        return f"{head} {self._value(types, schema, rule)}"

    def _typed(self, types: set[str], schema: Mapping[str, Any], rule: str) -> str:
        """Returns what matches the type of a value, and the value."""
        calls = self._calls
        close = self.marker(calls.type_close)
        text = f"{_literal(calls.string_type)} {close} {self._string(schema)}"
        other_type = '"false"' if calls.string_type == "true" else "/[a-z]{1,16}/"
        other = f"{other_type} {close} {_json(schema)} {self.marker(calls.value_close)}"
        if types == {"string"}:
            return text
        if types and "string" not in types:
            return other
        return f"({self._add(f'{rule}_text', text)} | {self._add(f'{rule}_json', other)})"

    def _value(self, types: set[str], schema: Mapping[str, Any], rule: str) -> str:
        """Returns what matches a value and its closing marker."""
        calls = self._calls
        close = self.marker(calls.value_close)
        if calls.values is Values.TEXT:
            if "string" in types or not types:
                return self._string(schema)
            return f"{_json(schema)} {close}"
        if calls.values is Values.JSON:
            return f"{_json(schema)} {close}".strip()
        return f"{self._literal_value(schema)} {close}".strip()

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Returns what matches a string that is written as it is, and its closing marker."""
        texts = _texts(schema)
        if texts:
            return f"({' | '.join(map(_literal, texts))}) {self.marker(self._calls.value_close)}"
        return self._text_until(self._calls.value_close)

    # values that are not JSON

    def _object(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns what matches the object of a call's arguments, whose keys have no quotes."""
        names = {
            key: self._add(f"{rule}_{number}", f'{_literal(key)} ":" {self._literal_value(value)}')
            for number, (key, value) in enumerate(_properties(schema).items())
        }
        other = ""
        if schema.get("additionalProperties"):
            other = self._add(f"{rule}_other", f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self._literal_value({})}')
        return f'"{{" {self._any_order(rule, names, other, schema, ",")} "}}"'

    def _literal_value(self, schema: object) -> str:
        """Returns what matches a value of a type that the schema allows: what is inside of lists and objects, it does
        not look at."""
        self._add_literals()
        types, texts = types_of(schema), _texts(schema)
        if texts:
            quote = '"' if self._calls.values is Values.PYTHON else self._calls.quote
            return f"({' | '.join(self.marker(quote + text + quote) for text in texts)})"
        names = {"number": "v_number", "integer": "v_integer", "string": "v_string", "array": "v_array"}
        names |= {"object": "v_object", "boolean": "v_boolean", "null": "v_null"}
        return f"({' | '.join(names[one] for one in sorted(types))})" if types else "v_any"

    def _add_literals(self) -> None:
        if any(rule.startswith("v_any:") for rule in self._rules):
            return
        calls, words = self._calls, _LITERALS[self._calls.values]
        comma, colon = ('", "', '": "') if calls.values is Values.PYTHON else ('","', '":"')
        self._add("v_integer", "/-?(0|[1-9][0-9]*)/")
        self._add("v_number", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
        for name in ("boolean", "null"):
            self._add(f"v_{name}", " | ".join(map(_literal, words[name])))
        if calls.values is Values.PYTHON:
            self._add("v_string", r"""/"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/""")
            key = "v_string"
        else:
            self._add("v_string", f"{self.marker(calls.quote)} {self._text_until(calls.quote)}")
            key = "/[A-Za-z_][A-Za-z0-9_]*/"
        self._add("v_array", f'"[" (v_any ({comma} v_any)*)? "]"')
        self._add("v_member", f"{key} {colon} v_any")
        self._add("v_object", f'"{{" (v_member ({comma} v_member)*)? "}}"')
        self._add("v_any", "v_string | v_number | v_boolean | v_null | v_array | v_object")


def _texts(schema: object) -> list[str]:
    """Returns the texts that a value may be, if the schema lists them."""
    found = schema.get("enum") if isinstance(schema, Mapping) else None
    return list(found) if isinstance(found, Sequence) and all(isinstance(one, str) and one for one in found) else []


def _joined(first: str, second: str) -> str:
    """Joins two markers. Whitespace at the edges where they meet is the same."""
    edge = first[len(first.rstrip()) :] if second[:1].isspace() else ""
    return first.removesuffix(edge) + second if edge else first + second


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. Those that it does not name are allowed only if it says so."""
    return {"type": "object", "properties": {}, "additionalProperties": False} | dict(schema)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    whole = {"x-guidance": _JSON_STYLE} | (dict(schema) or {"type": "object"})
    return f"%json {json.dumps(whole, ensure_ascii=False)}"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
