"""Finds a known call in a rendered text, and analyses the text around its words."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from tokenbus.worker.chat_format.inference.probe import IDS, KEYS, TEXTS, VALUE_KEYS, TemplateProbe, call
from tokenbus.worker.contract.chat_format import Calls, Kind, Values

_MAX_BRACES = 64
_decode = json.JSONDecoder().raw_decode


class CallShape(msgspec.Struct, frozen=True):
    """A call in a text: its position, and what its inside reveals about the format."""

    start: int
    end: int
    calls: Calls
    """Only the fields that concern a call's inside are set."""


def find_call(probe: TemplateProbe, text: str, place: int, start: int = 0) -> CallShape | None:
    """Finds the call of the `place`th known function, with the arguments TEXTS, after `start`."""
    name = call(place, TEXTS)["function"]["name"]
    at = text.find(name, start)
    if at < 0:
        return None
    return (
        _find_json(text, name, IDS[place], start)
        or _find_named(text, name, IDS[place], at, start)
        or _find_tagged(probe, text, name, at)
    )


def _objects(text: str, start: int) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns the JSON objects in a text, outermost first."""
    found = []
    for brace in [one.start() for one in re.finditer(r"\{", text[start:])][:_MAX_BRACES]:
        try:
            value, end = _decode(text, start + brace)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append((start + brace, end, value))
    return found


def _find_json(text: str, name: str, call_id: str, start: int) -> CallShape | None:
    for begin, end, value in _objects(text, start):
        if value == {name: TEXTS}:
            return CallShape(begin, end, Calls(kind=Kind.JSON, name_key=""))
        name_key = next((key for key, one in value.items() if one == name), None)
        arguments_key = next((key for key, one in value.items() if one == TEXTS), None)
        if name_key is not None and arguments_key is not None:
            id_key = next((key for key, one in value.items() if one == call_id or str(one).isdigit()), "")
            calls = Calls(kind=Kind.JSON, name_key=name_key, arguments_key=arguments_key, id_key=id_key)
            return CallShape(begin, end, calls)
    return None


def _find_named(text: str, name: str, call_id: str, at: int, start: int) -> CallShape | None:
    begin, end = next(((begin, end) for begin, end, value in _objects(text, at) if value == TEXTS), (0, 0))
    if not end:
        return None
    header, name_close = "{name}", text[at + len(name) : begin]
    if call_id in name_close:
        before, _, name_close = name_close.partition(call_id)
        header += f"{before}{{id}}"
    elif (id_at := text.find(call_id, start, at)) >= 0:
        header = f"{{id}}{text[id_at + len(call_id) : at]}{header}"
        at = id_at
    return CallShape(at, end, Calls(kind=Kind.NAMED, header=header, name_close=name_close))


def _find_tagged(probe: TemplateProbe, text: str, name: str, at: int) -> CallShape | None:
    """Analyses a call whose arguments are written one by one."""
    bounds = [at + len(name)]
    for word in (KEYS[0], TEXTS[KEYS[0]], KEYS[1], TEXTS[KEYS[1]]):
        found = text.find(word, bounds[-1])
        if found < 0:
            return None
        bounds += [found, found + len(word)]
    opening, key_close, between, second = (text[bounds[i] : bounds[i + 1]] for i in (0, 2, 4, 6))
    rest = text[bounds[-1] :]
    if key_close != second:
        return None
    values = Values.TEXT
    if key_close[-1:] in ("'", '"') and between.startswith(key_close[-1]) and rest.startswith(key_close[-1]):
        key_close, between, rest = key_close[:-1], between[1:], rest[1:]
        values = Values.PYTHON if _behind_key(probe, "boolean", True).startswith(f"{key_close}True") else Values.JSON
    argument_open = probe.common_suffix(opening, between)
    closing = between.removesuffix(argument_open)
    value_close = probe.common_prefix(rest, closing)
    calls = Calls(
        kind=Kind.TAGGED,
        values=values,
        name_close=opening.removesuffix(argument_open),
        argument_open=argument_open,
        key_close=key_close,
        value_close=value_close,
        argument_separator=closing.removeprefix(value_close),
    )
    end = len(text) - len(rest) + len(value_close)
    return CallShape(at, end, _with_type(probe, calls) if values is Values.TEXT else calls)


def _behind_key(probe: TemplateProbe, kind: str, value: object) -> str:
    text = probe.answer(call(0, {VALUE_KEYS[kind]: value}))
    return text.rpartition(VALUE_KEYS[kind])[2] if text and VALUE_KEYS[kind] in text else ""


def _with_type(probe: TemplateProbe, calls: Calls) -> Calls:
    """Finds the type in the text before a value, if it differs between numbers and texts."""
    number = 123456789
    close = _behind_key(probe, "number", number).partition(str(number))[0]
    if not close or close == calls.key_close:
        return calls
    text_close = calls.key_close
    before = 0
    while before < min(len(close), len(text_close)) and close[before] == text_close[before]:
        before += 1
    key_close = re.sub(r"\w+$", "", text_close[:before])
    one, other = text_close[len(key_close) :], close[len(key_close) :]
    found, number_type = re.match(r"\w+", one), re.match(r"\w+", other)
    if not (key_close and found and number_type) or one[found.end() :] != other[number_type.end() :]:
        return calls
    return msgspec.structs.replace(calls, key_close=key_close, string_type=found[0], type_close=one[found.end() :])
