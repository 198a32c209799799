"""Offers a request's tools to the model as functions, and maps the names in its calls back to them.

Functions within a namespace are prefixed with its name. Custom tools, whose input is free text, become functions with
one parameter. Tools that a server would have to run are left out."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenbus.protocol.wire import errors

_INPUT = "input"
"""The only parameter of a function that stands for a custom tool."""
_UNASKED = {"description": None, "parameters": None, "strict": None}
"""Fields that every function of a response has."""
_OPENING = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_OTHER = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_WHOLE_CHARACTERS = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|{_OTHER}|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{{4}}))*'
)
"""Leaves alone an incomplete escape, and the first half of a surrogate pair while the second may follow."""


class ResponsesTool(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


class OfferedTools:
    """The tools of one request and its choice among them."""

    def __init__(self, given: Sequence[tuple[str, dict[str, Any]]], choice: str | dict[str, Any] | None) -> None:
        """`given` has the tools with their paths in the request. Raises RequestError for a malformed choice or
        namespace."""
        self.functions: list[dict[str, Any]] = []
        """The functions of the wire."""
        self.paths: list[str] = []
        """The path of each function in the request."""
        self.given: list[dict[str, Any]] = []
        """The request's tools that are offered."""
        self._tools: dict[str, ResponsesTool] = {}
        for path, tool in given:
            before = len(self.functions)
            self._offer(tool, path, None)
            if len(self.functions) > before:
                self.given.append(_UNASKED | tool if tool["type"] == "function" else tool)
        self.choice = self._choose(choice)
        """The choice, in the wire's form."""

    def called(self, function: str) -> ResponsesTool:
        """Returns the tool named by a call."""
        return self._tools.get(function, ResponsesTool(function, None, False))

    def _choose(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            self._allow(choice.get("tools"))
            mode: str | None = choice.get("mode")
            return mode
        if choice.get("type") not in ("function", "custom"):
            raise errors.invalid_field("tool_choice", "must name a function or a custom tool")
        if isinstance(named := choice.get("function"), dict):  # as in chat completions
            choice = named
        return {"type": "function", "function": {"name": _name_in(choice)}}

    def _allow(self, allowed: object) -> None:
        """Keeps only the allowed functions, and what has no proper name, which validation refuses."""
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise errors.invalid_field("tool_choice.tools", "must be a list of tools")
        names = {name for tool in allowed if isinstance(name := _name_in(tool), str)}
        left = [
            (function, path)
            for function, path in zip(self.functions, self.paths, strict=True)
            if not isinstance(name := function["function"].get("name"), str) or name in names
        ]
        self.functions = [function for function, _ in left]
        self.paths = [path for _, path in left]

    def _offer(self, tool: dict[str, Any], path: str, namespace: str | None) -> None:
        match tool.get("type"):
            case "namespace" if namespace is None:
                self._offer_all(tool, path)
            case "function":
                self._add(tool, path, namespace, tool.get("parameters"), tool.get("description"))
            case "custom":
                parameters = {
                    "type": "object",
                    "properties": {_INPUT: {"type": "string"}},
                    "required": [_INPUT],
                    "additionalProperties": False,
                }
                self._add(tool, path, namespace, parameters, _described(tool))

    def _offer_all(self, namespace: dict[str, Any], path: str) -> None:
        name, tools = namespace.get("name"), namespace.get("tools")
        if not isinstance(name, str):
            raise errors.invalid_field(f"{path}.name", "must be a string")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise errors.invalid_field(f"{path}.tools", "must be a list of tools")
        for index, tool in enumerate(tools):
            self._offer(tool, f"{path}.tools[{index}]", name)

    def _add(
        self, tool: dict[str, Any], path: str, namespace: str | None, parameters: object, description: object
    ) -> None:
        name = tool.get("name")
        if isinstance(name, str):
            known = ResponsesTool(name, namespace, tool["type"] == "custom")
            name = full_name(name, namespace)
            self._tools[name] = known
        fields = {"name": name, "description": description, "parameters": parameters}
        function = {key: value for key, value in fields.items() if value is not None}
        self.functions.append({"type": "function", "function": function})
        self.paths.append(path)


def full_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


def _name_in(choice: dict[str, Any]) -> object:
    name, namespace = choice.get("name"), choice.get("namespace")
    return full_name(name, namespace) if isinstance(name, str) and isinstance(namespace, str) else name


def _described(custom: dict[str, Any]) -> object:
    """Returns the description of a custom tool, including its input's grammar, which is described to the model but not
    enforced."""
    description, wanted = custom.get("description"), custom.get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "grammar":
        return description
    syntax, grammar = wanted.get("syntax"), wanted.get("definition")
    told = f"The argument `{_INPUT}` must follow this {syntax} grammar:\n{grammar}"
    return f"{description}\n\n{told}" if isinstance(description, str) else told


class CustomInput:
    """Decodes `{"input": "..."}` while it is being written. Arguments in any other form are themselves the input."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._pending = ""
        self._is_open = False

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._pieces)

    def feed(self, added: str) -> str:
        """Takes more of the arguments, and returns the input that they add."""
        self._pending += added
        if not self._is_open:
            opening = _OPENING.match(self._pending)
            if opening is None:
                return ""
            self._is_open = True
            self._pending = self._pending[opening.end() :]
        whole = _WHOLE_CHARACTERS.match(self._pending)
        assert whole is not None
        self._pending = self._pending[whole.end() :]
        return self._decoded(whole[0])

    def end(self) -> str:
        """Returns the rest of the input, once the arguments are complete or cut off."""
        return "" if self._is_open else self._keep(self._pending)

    def _decoded(self, escaped: str) -> str:
        text: str = json.loads(f'"{escaped}"', strict=False)
        return self._keep(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _keep(self, text: str) -> str:
        self._pieces += [text] if text else []
        return text


def input_of(arguments: str) -> str:
    """Returns the input in the arguments of a whole call."""
    read = CustomInput()
    read.feed(arguments)
    read.end()
    return read.text


def arguments_of(text: str) -> str:
    """Returns the arguments that stand for an input."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)
