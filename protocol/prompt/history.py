"""Prepares a conversation for a chat template: completes its past tool calls, and validates them."""

import enum
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import codec, messages
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.errors import invalid_field

MessageDict = dict[str, Any]
"""A message as templates see it: fields by name, absent ones left out."""


class Beside(enum.Enum):
    """Where an answer's content goes when it also has calls."""

    SAME_MESSAGE = enum.auto()
    REASONING = enum.auto()
    """Appended to the reasoning: the template takes either content or reasoning."""
    OWN_MESSAGE = enum.auto()
    """Into a message before the calls: the template omits the calls of a message that has content."""


class AnswerForm(NamedTuple):
    """The form in which a template takes past answers (`template.py` finds it)."""

    with_objects: bool = True
    """Whether arguments are objects rather than the wire's JSON text."""
    empty_content: str | None = ""
    """The content to give an answer that has calls and no content."""
    beside: Beside = Beside.SAME_MESSAGE
    thinks_in_content: bool = False
    """Whether reasoning is a chunk of the content rather than a field."""


USUAL_FORM = AnswerForm()


def message_dicts(conversation: list[messages.ChatMessage], form: AnswerForm = USUAL_FORM) -> list[MessageDict]:
    """Returns a conversation's messages such that every call has an id and every result names its call.

    Raises RequestError for a call without a name, arguments that are not a JSON object, or a result without a call."""
    calls = _Calls(form.with_objects)
    return [
        made
        for index, message in enumerate(conversation)
        for made in _with_form(_message_dict(message, f"messages[{index}]", calls), form)
    ]


def needs_form(conversation: list[messages.ChatMessage]) -> bool:
    """Whether it has an answer that templates take in different forms."""
    return any(message.tool_calls or message.reasoning_content for message in conversation)


def has_calls(conversation: list[messages.ChatMessage]) -> bool:
    """Whether it has calls, or results of calls."""
    return any(message.tool_calls or message.role == "tool" for message in conversation)


def _message_dict(message: messages.ChatMessage, path: str, calls: "_Calls") -> MessageDict:
    fields = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    fields["content"] = validation.message_text(message)
    if not message.reasoning_content:
        fields.pop("reasoning_content", None)
    # Clients send an empty list if there are no calls, and templates take it for calls.
    made = [calls.add(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or [])]
    if made:
        fields["tool_calls"] = made
    else:
        fields.pop("tool_calls", None)
    if message.role == "tool":
        fields |= calls.answer(message, path)
    return fields


def _with_form(message: MessageDict, form: AnswerForm) -> Iterator[MessageDict]:
    """Yields the messages that a template is given in place of one."""
    content = message["content"]
    if "tool_calls" in message:
        if content and form.beside is Beside.OWN_MESSAGE:
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            yield _with_reasoning(said, form)
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        if content and form.beside is Beside.REASONING:
            thought = message.get("reasoning_content")
            message = message | {"reasoning_content": f"{thought}\n\n{content}" if thought else content}
        if not content or form.beside is not Beside.SAME_MESSAGE:
            message = message | {"content": form.empty_content}
    yield _with_reasoning(message, form)


def _with_reasoning(message: MessageDict, form: AnswerForm) -> MessageDict:
    """Returns a message with its reasoning where the template reads it.

    Templates have three names for it. Those that know several take the first one present."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    if reasoning is None:
        return message
    if form.thinks_in_content:
        words = [{"type": "text", "text": content}] if content else []
        return message | {"content": [{"type": "thinking", "thinking": reasoning}, *words]}
    return message | {"reasoning": reasoning, "thinking": reasoning}


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
        """Returns the call that a result belongs to: without an id, the first call that has no result yet."""
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
    """Returns checked arguments in the form that a template needs. A model may omit them for a call without
    arguments."""
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
