"""Writes the grammars of notations other than JSON: arguments in any order, Python literals, bare keys."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenbus.worker.chat_format.grammar.lark import LarkWriter, literal
from tokenbus.worker.chat_format.grammar.schemas import members
from tokenbus.worker.chat_format.parsing.schema import followed, types_of
from tokenbus.worker.contract.chat_format import Calls, Values

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
        other = lark.add(f"{rule}_other", f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value_of(lark, calls, {})}')
    return f'"{{" {any_order(lark, rule, names, other, schema, ",")} "}}"'


def value_of(lark: LarkWriter, calls: Calls, schema: object) -> str:
    """Returns an expression for a value of a type that the schema allows, ignoring the contents of lists and
    objects."""
    _add_values(lark, calls)
    types, texts = types_of(schema, schema), texts_of(schema)
    if texts:
        quote = '"' if calls.values is Values.PYTHON else calls.quote
        return f"{lark.marker(quote)} {lark.texts_until(texts, quote)}"
    return f"({' | '.join(f'v_{one}' for one in sorted(types))})" if types else "v_any"


def texts_of(schema: object) -> list[str]:
    """Returns the allowed texts of a value, if the schema lists them."""
    schema = followed(schema, schema)
    found = schema.get("enum") if isinstance(schema, Mapping) else None
    return list(found) if isinstance(found, Sequence) and all(isinstance(one, str) and one for one in found) else []


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
