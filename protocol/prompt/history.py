"""Prepares a conversation for a chat template: completes its past tool calls, and finds the mistakes in them."""

import itertools
from typing import Any

import msgspec

from tokenbus.protocol.wire import codec, messages, validation
from tokenbus.protocol.wire.errors import invalid_field

MessageDict = dict[str, Any]
"""A message as templates see it: fields by name, without those that are absent."""


def message_dicts(conversation: list[messages.ChatMessage], with_objects: bool) -> list[MessageDict]:
    """Returns the messages of a conversation, in which every call has an id and every result names its call.

    `arguments` of calls are objects if `with_objects`, else JSON texts. Raises RequestError for a call without a name,
    for arguments that are no JSON object, and for a result without a call."""
    calls = _Calls(with_objects)
    return [_message_dict(message, f"messages[{index}]", calls) for index, message in enumerate(conversation)]


def has_calls(conversation: list[messages.ChatMessage]) -> bool:
    return any(message.tool_calls for message in conversation)


def _message_dict(message: messages.ChatMessage, path: str, calls: "_Calls") -> MessageDict:
    fields = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    fields["content"] = validation.message_text(message)
    if message.reasoning_content is not None:
        # Templates have three names for it. Those that know several take the first that is there.
        fields |= {"reasoning": message.reasoning_content, "thinking": message.reasoning_content}
    if message.tool_calls is not None:
        fields["tool_calls"] = [
            calls.add(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        fields |= calls.answer(message, path)
    return fields


class _Calls:
    """The calls of one conversation so far, in their order."""

    def __init__(self, with_objects: bool) -> None:
        self._with_objects = with_objects
        self._names: dict[str, str] = {}
        """The names of the functions called, by the call's id."""
        self._unanswered: dict[str, None] = {}
        self._made_ids = (f"call{number:05}" for number in itertools.count())

    def add(self, call: dict[str, Any], path: str) -> dict[str, Any]:
        """Returns a call with an id, a type and checked arguments."""
        function = call.get("function")
        if not isinstance(function, dict):
            raise invalid_field(f"{path}.function", "must be an object with name and arguments")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise invalid_field(f"{path}.function.name", "must be a string that is not empty")
        call_id = call.get("id")
        if call_id is None:
            # Nine letters and digits, since Mistral's templates accept nothing else.
            call_id = next(made for made in self._made_ids if made not in self._names)
        elif not isinstance(call_id, str) or not call_id:
            raise invalid_field(f"{path}.id", "must be a string that is not empty")
        self._names[call_id] = name
        self._unanswered[call_id] = None
        arguments = _arguments(function.get("arguments"), f"{path}.function.arguments", self._with_objects)
        return call | {"id": call_id, "type": "function", "function": function | {"arguments": arguments}}

    def answer(self, message: messages.ChatMessage, path: str) -> MessageDict:
        """Returns which call a result is for. Without an id it is the first that has no result yet."""
        call_id = message.tool_call_id
        if call_id is None:
            call_id = next(iter(self._unanswered), None)
        if call_id is None:
            raise invalid_field(f"{path}.tool_call_id", "there is no tool call before it that has no result yet")
        if call_id not in self._names:
            raise invalid_field(f"{path}.tool_call_id", f"no tool call before it has the id {call_id[:100]!r}")
        self._unanswered.pop(call_id, None)
        return {"tool_call_id": call_id, "name": message.name or self._names[call_id]}


def _arguments(value: object, path: str, with_objects: bool) -> str | dict[str, Any]:
    """Returns checked arguments in the form that a template needs. Models that call without arguments write none."""
    if isinstance(value, str) and value.strip():
        try:
            parsed = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise invalid_field(path, f"must be a JSON object: {error}") from error
    else:
        parsed = {} if value is None or isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise invalid_field(path, "must be a JSON object")
    codec.check_nesting(parsed, path)
    if with_objects:
        return parsed
    return value if isinstance(value, str) and value.strip() else msgspec.json.encode(parsed).decode()
