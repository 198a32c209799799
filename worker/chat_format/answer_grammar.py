"""Writes the grammar of an answer with reasoning and tool calls, from a chat format and the tools.

With `auto`, text is free until the marker that opens a call; from there on, everything follows the format and the
tool's schema. With `required`, or with one tool that must be called, the answer is only calls, after the reasoning:

    auto        reasoning?  free text  (opening marker  calls)?
    required    reasoning?  opening marker  calls

Markers that are single tokens are written as token ids, so that no text can be mistaken for them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tokenbus.worker.chat_format.lark import (
    GrammarError,
    LarkWriter,
    MemberSchema,
    closed,
    joined,
    json_of,
    literal,
    members,
    moved,
    one_of,
    with_style,
)
from tokenbus.worker.contract.chat_format import Calls, Channels, ChatFormat, Kind, Values

Tools = Mapping[str, Mapping[str, Any]]


def calls_grammar(
    form: ChatFormat,
    tools: Tools,
    *,
    is_required: bool,
    parallel: bool = True,
    in_reasoning: bool = False,
    may_reason: bool = True,
    content: Mapping[str, Any] | None = None,
    strict: Collection[str] = (),
) -> str:
    """Returns the grammar of an answer that may call these tools, or must if `is_required`.

    `parallel`: it may have more than one call. `in_reasoning`: it begins inside the reasoning. `may_reason`: it may
    open reasoning itself. `content`: the JSON schema of an answer without calls. `strict` names the tools whose schemas
    must be followed completely. The rule `call_<n>` matches the calls of tool number n. Raises GrammarError."""
    if form.calls is None or not tools:
        raise GrammarError("the model's chat format has no tool calls")
    calls = form.calls if parallel else msgspec.structs.replace(form.calls, parallel=False)
    lark = LarkWriter(form.tokens)
    arguments = {name: closed(schema, is_strict=name in strict) for name, schema in tools.items()}
    free = "TEXT" if content is None else json_of(content)
    if form.channels is not None:
        answer = _messages(lark, form.channels, free, may_reason=may_reason)
        lark.add("call", _called_messages(lark, form.channels, arguments))
        return lark.write("message* call" if is_required else f"{answer} | message* call")
    lark.add("content", _content(lark, form, calls, arguments, free, is_required=is_required))
    return lark.write(f"{_reasoning(lark, form, is_open=in_reasoning, may_open=may_reason)} content")


def reasoning_grammar(form: ChatFormat, *, in_reasoning: bool, may_reason: bool = True) -> str:
    """Returns the grammar of what comes before an answer's text, such as reasoning, followed by `@body`; empty if
    nothing does. `in_reasoning`: it begins inside the reasoning. `may_reason`: it may open reasoning itself."""
    lark = LarkWriter(form.tokens)
    if form.channels is not None:
        return lark.write(_messages(lark, form.channels, "@body", may_reason=may_reason))
    before = f"{_reasoning(lark, form, is_open=in_reasoning, may_open=may_reason)} {_content_open(lark, form)}".strip()
    return lark.write(f"{before} @body") if before else ""


def _reasoning(lark: LarkWriter, form: ChatFormat, *, is_open: bool, may_open: bool) -> str:
    reasoning = form.reasoning
    if reasoning is None:
        return ""
    if is_open:
        return lark.text_until(reasoning.close)
    if not may_open or not reasoning.open.strip():
        return ""
    return f"({lark.marker(reasoning.open.lstrip())} {lark.text_until(reasoning.close)})?"


def _content_open(lark: LarkWriter, form: ChatFormat) -> str:
    return f"({lark.marker(form.content_open.strip())})? " if form.content_open else ""


def _content(lark: LarkWriter, form: ChatFormat, calls: Calls, tools: Tools, free: str, *, is_required: bool) -> str:
    """Returns an expression for an answer after its reasoning; `free` is the answer without calls."""
    opening = joined(calls.section_open, calls.call_open)
    announce = f"({lark.marker(calls.announce.strip())})? " if calls.announce else ""
    closing = f" ({lark.marker(calls.announce_close.strip())})?" if calls.announce_close else ""
    called = f"{_calls(lark, calls, tools)}{closing}"
    marked = f"{announce}{lark.marker(opening.lstrip())} {called}"
    if is_required:
        return marked
    content_open = _content_open(lark, form)
    if free != "TEXT":
        return f"{content_open}{free} | {marked}"
    first = (calls.section_open or calls.call_open).strip()
    if first in ("", "["):  # no marker of its own: a call begins like an answer, and its first character decides
        other = lark.add("FREE", rf"/\s*[^\s{re.escape(first or '{')}](.|\n)*/")
        return f"{announce}{lark.marker(opening)} {called} | {other} | SPACE"
    return f"{content_open}TEXT | {content_open}{lark.text_until(opening)} {called}"


def _calls(lark: LarkWriter, calls: Calls, tools: Tools) -> str:
    """Returns an expression for all calls of an answer after the marker that opens the first one."""
    writer = CallWriter(lark, calls)
    names = [writer.write(f"call_{number}", name, schema) for number, (name, schema) in enumerate(tools.items())]
    lark.add("call", " | ".join(names))
    more = f" ({lark.marker(joined(calls.separator, calls.call_open))} call)*" if calls.parallel else ""
    return f"call{more} {lark.marker(calls.section_close)}".strip()


def _messages(lark: LarkWriter, channels: Channels, last: str, *, may_reason: bool) -> str:
    """Returns an expression for messages with headers: any number of them before the last one, whose body is `last`."""
    channel, body = lark.marker(channels.channel), lark.marker(channels.body)
    kinds = one_of([*(channels.reasoning if may_reason else ()), *channels.content])
    lark.add("message", f"{channel} {kinds} {body} TEXT {lark.marker(channels.ends[0])} {lark.marker(channels.start)}")
    lark.add("answer", f"{channel} {one_of(list(channels.content))} {body} {last}")
    return "message* answer"


def _called_messages(lark: LarkWriter, channels: Channels, tools: Tools) -> str:
    """Returns an expression for a message that is a call."""
    constrain = f'{literal(" ")} {lark.marker(channels.constrain)} "json"' if channels.constrain else ""
    found = []
    for number, (name, schema) in enumerate(tools.items()):
        header = literal(f"{channels.content[-1]}{channels.recipient}{channels.function}{name}")
        head = f"{lark.marker(channels.channel)} {header} {constrain} {lark.marker(channels.body)}"
        found.append(lark.add(f"call_{number}", f"{head} {json_of(schema)}"))
    return " | ".join(found)


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
            other = self._lark.add(f"{rule}_other", self._argument(None, MemberSchema(), f"{rule}_other"))
        return any_order(self._lark, rule, names, other, schema, self._calls.argument_separator)

    def _argument(self, key: str | None, member: MemberSchema, rule: str) -> str:
        calls, lark = self._calls, self._lark
        name = r"/[A-Za-z0-9_.-]{1,64}/" if key is None else literal(_escaped(key) if calls.keys_escaped else key)
        head = f"{lark.marker(calls.argument_open)} {name} {lark.marker(calls.key_close)}"
        return f"{head} {self._typed(member, rule) if calls.type_close else self._value(member)}"

    def _typed(self, member: MemberSchema, rule: str) -> str:
        """Returns an expression for the type of a value, and the value."""
        calls, types = self._calls, member.types
        close = self._lark.marker(calls.type_close)
        text = f"{literal(calls.string_type)} {close} {self._string(member)}"
        if types == {"string"}:
            return text
        other_type = '"false"' if calls.string_type == "true" else "/[a-z]{1,16}/"
        other = f"{other_type} {close} {json_of(member.alone)} {self._lark.marker(calls.value_close)}"
        if types and "string" not in types:
            return other
        return f"({self._lark.add(f'{rule}_text', text)} | {self._lark.add(f'{rule}_json', other)})"

    def _value(self, member: MemberSchema) -> str:
        """Returns an expression for a value and its closing marker."""
        calls, types = self._calls, member.types
        close = self._lark.marker(calls.value_close)
        if calls.values is Values.TEXT and ("string" in types or not types):
            return self._string(member)
        if calls.values in (Values.TEXT, Values.JSON):
            return f"{json_of(member.alone)} {close}".strip()
        return f"{value_of(self._lark, calls, member)} {close}".strip()

    def _string(self, member: MemberSchema) -> str:
        """Returns an expression for a raw string and its closing marker."""
        if member.texts:
            return self._lark.texts_until(member.texts, self._calls.value_close)
        return self._lark.text_until(self._calls.value_close)


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


_MAX_COUNTED = 6
_PYTHON = {"boolean": ("True", "False"), "null": ("None",)}
_JSON = {"boolean": ("true", "false"), "null": ("null",)}


def any_order(
    lark: LarkWriter, rule: str, members: Mapping[str, str], other: str, schema: Mapping[str, Any], separator: str
) -> str:
    """Returns an expression for members, given by key, in any order, with each required one exactly once. The others,
    and `other`, may repeat.

    There is a rule for each set of required members that are still missing, up to 64 sets; members beyond are not
    counted."""
    required = schema.get("required")
    required = required if isinstance(required, Sequence) else ()
    counted = [key for key in members if key in required][:_MAX_COUNTED]
    others = [name for key, name in members.items() if key not in counted] + [other] * bool(other)
    # once, rather than in each of the rules below
    free = [lark.add(f"{rule}_free", " | ".join(others))] if others else []
    between = f"{literal(separator)} " if separator else ""

    def rest(left: tuple[str, ...]) -> str:
        return f"{rule}_args_{sum(1 << counted.index(key) for key in left)}"

    def choices(left: tuple[str, ...], before: str) -> str:
        found = [f"{before}{members[key]} {rest(tuple(one for one in left if one != key))}" for key in left]
        found += [f"{before}{name} {rest(left)}" for name in free]
        if not left:
            found.append('""')
        return " | ".join(found)

    for size in range(len(counted) + 1):
        for left in itertools.combinations(counted, size):
            lark.add(rest(left), choices(left, between))
    return lark.add(f"{rule}_args", choices(tuple(counted), ""))


def bare_object(lark: LarkWriter, calls: Calls, rule: str, schema: Mapping[str, Any]) -> str:
    """Returns an expression for a call's arguments object with unquoted keys."""
    names = {
        key: lark.add(f"{rule}_{number}", f'{literal(key)} ":" {value_of(lark, calls, value)}')
        for number, (key, value) in enumerate(members(schema))
    }
    other = ""
    if schema.get("additionalProperties"):
        other = lark.add(f"{rule}_other", f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value_of(lark, calls, MemberSchema())}')
    return f'"{{" {any_order(lark, rule, names, other, schema, ",")} "}}"'


def value_of(lark: LarkWriter, calls: Calls, member: MemberSchema) -> str:
    """Returns an expression for a value of a type that the schema allows, ignoring the contents of lists and
    objects."""
    _add_values(lark, calls)
    if member.texts:
        quote = '"' if calls.values is Values.PYTHON else calls.quote
        return f"{lark.marker(quote)} {lark.texts_until(member.texts, quote)}"
    return f"({' | '.join(f'v_{one}' for one in sorted(member.types))})" if member.types else "v_any"


def _add_values(lark: LarkWriter, calls: Calls) -> None:
    if "v_any" in lark:
        return
    is_python = calls.values is Values.PYTHON
    comma, colon = ('", "', '": "') if is_python else ('","', '":"')
    lark.add("v_integer", "/-?(0|[1-9][0-9]*)/")
    lark.add("v_number", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
    for name, words in (_PYTHON if is_python else _JSON).items():
        lark.add(f"v_{name}", " | ".join(map(literal, words)))
    if is_python:
        lark.add("v_string", r"""/"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/""")
        key = "v_string"
    else:
        lark.add("v_string", f"{lark.marker(calls.quote)} {lark.text_until(calls.quote)}")
        key = "/[A-Za-z_][A-Za-z0-9_]*/"
    lark.add("v_array", f'"[" (v_any ({comma} v_any)*)? "]"')
    lark.add("v_member", f"{key} {colon} v_any")
    lark.add("v_object", f'"{{" (v_member ({comma} v_member)*)? "}}"')
    lark.add("v_any", "v_string | v_number | v_boolean | v_null | v_array | v_object")
