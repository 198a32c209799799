"""Validates the tools of a request and the variables of its chat template, and bounds JSON schemas, since an engine
compiles them."""

import re
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import codec, limits
from tokenbus.protocol.wire.errors import invalid_field

_PROPERTIES = ("properties", "$defs", "definitions")
_PATTERNS = ("patternProperties",)
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}")


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raises RequestError for the first field of a tool that is not allowed."""
    if len(tools) > limits.MAX_TOOLS:
        raise invalid_field("tools", f"at most {limits.MAX_TOOLS} tools are allowed, got {len(tools)}")
    names: set[str] = set()
    total = _Members()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        name = _check_tool(tool, path)
        if name in names:
            raise invalid_field(f"{path}.function.name", f"{name!r} is also the name of an earlier tool")
        names.add(name)
        found = _count_members(tool["function"].get("parameters"))
        _check_counts(found, f"{path}.function.parameters", limits.MAX_SCHEMA_PROPERTIES)
        total = _Members(*map(sum, zip(total, found, strict=True)))
        if total.values > limits.MAX_TOOL_VALUES:
            problem = f"must have at most {limits.MAX_TOOL_VALUES} objects and arrays in their parameters"
            raise invalid_field("tools", problem)
    _check_counts(total, "tools", limits.MAX_TOOL_PROPERTIES)


def check_tool_choice(choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]) -> None:
    """Raises RequestError unless the choice is a mode, or names one of the tools."""
    if choice in (None, "auto", "none") or choice == {}:
        return
    if not tools:
        raise invalid_field("tool_choice", "there are no tools to choose from")
    name = chosen_tool(choice)
    if choice != "required" and name is None:
        allowed = '{"type": "function", "function": {"name": ...}}'
        raise invalid_field("tool_choice", f"must be auto, none, required or {allowed}")
    if name is not None and name not in (tool["function"]["name"] for tool in tools):
        raise invalid_field("tool_choice.function.name", "is not the name of one of the tools")


def chosen_tool(choice: str | dict[str, Any] | None) -> str | None:
    """Returns the name of the tool that must be called; None if none must be."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_free_form(value: object, path: str) -> None:
    """Raises RequestError for a value that is passed on as it is, if it is nested too deeply or MessagePack can't hold
    it: JSON has integers of any size."""
    codec.check_nesting(value, path)
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise invalid_field(path, "must not have an integer of more than 64 bits") from error


def check_template_arguments(given: dict[str, Any] | None) -> None:
    """Raises RequestError for variables of the chat template that are too many, nested too deeply or no MessagePack."""
    path, num_values, parents = "chat_template_kwargs", 0, list[Any]([given])
    while parents and num_values <= limits.MAX_TEMPLATE_VALUES:
        parent = parents.pop()
        if isinstance(parent, dict | list):
            num_values += len(parent)
            if num_values <= limits.MAX_TEMPLATE_VALUES:
                parents += parent.values() if isinstance(parent, dict) else parent
    if num_values > limits.MAX_TEMPLATE_VALUES:
        raise invalid_field(path, f"must have at most {limits.MAX_TEMPLATE_VALUES} names, members and items in all")
    check_free_form(given, path)


def check_members(schema: object, path: str, max_properties: int) -> None:
    """Raises RequestError for a schema with too many properties or patterns."""
    _check_counts(_count_members(schema), path, max_properties)


def check_json_size(value: object, path: str, most: int) -> None:
    """Raises RequestError for a value that is larger as JSON, or can't be JSON."""
    try:
        size = len(msgspec.json.encode(value))
    except TypeError as error:  # MessagePack has maps whose keys are not strings
        raise invalid_field(path, f"must be JSON: {error}") from error
    if size > most:
        raise invalid_field(path, f"must have at most {most} bytes as JSON, got {size}")


def _check_tool(tool: dict[str, Any], path: str) -> str:
    """Returns the name of a tool, or raises RequestError."""
    check_free_form(tool, path)
    if tool.get("type") != "function":
        raise invalid_field(f"{path}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid_field(f"{path}.function", "must be an object with name, description and parameters")
    path = f"{path}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid_field(f"{path}.name", f"must be 1 to {limits.MAX_TOOL_NAME_CHARS} of A-Z a-z 0-9 _ . -")
    for field, kind, noun in (("description", str, "a string"), ("parameters", dict, "an object")):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise invalid_field(f"{path}.{field}", f"must be {noun}")
    if (function.get("parameters") or {}).get("type", "object") != "object":
        raise invalid_field(f"{path}.parameters.type", "must be object: arguments have names")
    check_json_size(function, path, limits.MAX_TOOL_BYTES)
    return name


class _Members(NamedTuple):
    """Counts of what makes schemas costly."""

    values: int = 0
    """The objects and arrays of which they consist."""
    properties: int = 0
    patterns: int = 0


def _count_members(schema: object) -> _Members:
    values = properties = patterns = 0
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            properties += sum(len(one[name]) for name in _PROPERTIES if isinstance(one.get(name), dict))
            patterns += sum(len(one[name]) for name in _PATTERNS if isinstance(one.get(name), dict))
            left += [child for child in one.values() if isinstance(child, (dict, list))]
        elif isinstance(one, list):
            left += [child for child in one if isinstance(child, (dict, list))]
        else:
            continue
        values += 1
    return _Members(values, properties, patterns)


def _check_counts(found: _Members, path: str, max_properties: int) -> None:
    """Raises RequestError for too many properties or patterns."""
    for names, most, count in (
        (_PROPERTIES, max_properties, found.properties),
        (_PATTERNS, limits.MAX_SCHEMA_PATTERNS, found.patterns),
    ):
        if count > most:
            raise invalid_field(path, f"must have at most {most} {' and '.join(names)}, got {count}")
