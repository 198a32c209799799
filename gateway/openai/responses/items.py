"""Turns the items of a conversation into wire messages, and the names of the wire's fields back into those of items.

Consecutive reasoning, texts and calls of the assistant form one message, as chat templates expect."""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai.responses.body import InputContentPart, InputItem, PlacedItem
from tokenbus.gateway.openai.responses.tools import arguments_of, full_name
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire

_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
}
_IN_CALL = {"id": "call_id", "function.name": "name", "function.arguments": "arguments"}
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.(.*))?")
_CALL = re.compile(r"tool_calls\[(\d+)\](?:\.(.*))?")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_MARK = "tokenbus.1."
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")


class MessagePath(NamedTuple):
    """The positions in the request of the items that make up a message."""

    item: str
    """The first item."""
    content: str
    """The content, if the message has any."""
    calls: list[str]
    """The items of its tool calls."""


class Conversation:
    """The messages made from items, and their origins."""

    def __init__(self) -> None:
        self.messages: list[wire.ChatMessage] = []
        self.paths: list[MessagePath] = []
        self._turn: _Turn | None = None
        """The assistant's message to which the last items belong."""

    def add(self, item: InputItem, path: str) -> None:
        """Adds the next item. Raises RequestError for one that is not served."""
        kind = item.type or ("message" if item.role else "item_reference")
        match kind:
            case "message" if item.role == "assistant":
                self._assistant(path).texts.append(_text(item.content, f"{path}.content") or "")
            case "message":
                text = _text(item.content, f"{path}.content")
                self._append(wire.ChatMessage(role=item.role or "", content=text), path, f"{path}.content")
            case "reasoning":
                text = _text(item.content, f"{path}.content") or unpack(item.encrypted_content)
                text = text or _joined([part.text or "" for part in item.summary or ()])
                self._assistant(path).reasoning.append(text)
            case "function_call":
                self._assistant(path).add_call(item, item.arguments, path)
            case "custom_tool_call":
                arguments = None if item.input is None else arguments_of(item.input)
                self._assistant(path).add_call(item, arguments, path)
            case "function_call_output" | "custom_tool_call_output":
                text = _text(item.output, f"{path}.output")
                result = wire.ChatMessage(role="tool", content=text, tool_call_id=item.call_id)
                self._append(result, path, f"{path}.output")
            case "additional_tools":
                pass  # these are offered with the others
            case "item_reference":
                raise errors.unsupported_field(f"{path}.type", "nothing is stored here: send the item itself")
            case "compaction" | "compaction_trigger":
                raise errors.unsupported_field(f"{path}.type", "there is no compaction: send the items themselves")
            case _:
                raise errors.unsupported_field(f"{path}.type", f"items of the type {kind[:100]!r} are not served")

    def end(self) -> None:
        """Ends the last message."""
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._append(turn.to_message(), turn.path, f"{turn.path}.content", turn.call_paths)

    def _assistant(self, path: str) -> "_Turn":
        self._turn = self._turn or _Turn(path)
        return self._turn

    def _append(self, message: wire.ChatMessage, path: str, content: str, calls: list[str] | None = None) -> None:
        self.end()
        self.messages.append(message)
        self.paths.append(MessagePath(path, content, calls or []))


class _Turn:
    """An assistant's message, from the items seen so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.call_paths: list[str] = []

    def add_call(self, item: InputItem, arguments: str | None, path: str) -> None:
        name = None if item.name is None else full_name(item.name, item.namespace)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.calls.append(call)
        self.call_paths.append(path)

    def to_message(self) -> wire.ChatMessage:
        return wire.ChatMessage(
            role="assistant",
            content=_joined(self.texts) or (None if self.calls else ""),
            reasoning_content=_joined(self.reasoning) or None,
            tool_calls=self.calls or None,
        )


def conversation_of(instructions: str | None, items: Sequence[PlacedItem]) -> Conversation:
    """Returns the conversation made of items, preceded by the instructions. Raises RequestError with OpenAI's name for
    the field at fault."""
    conversation = Conversation()
    if instructions:
        conversation.add(InputItem(role="system", content=instructions), "instructions")
    for item, path in items:
        conversation.add(item, path)
    conversation.end()
    return conversation


def is_continued(items: Sequence[PlacedItem], messages: Sequence[wire.ChatMessage]) -> bool:
    """Returns whether the answer continues the last item: a text of the assistant that is not said to be complete."""
    if not items or not messages:
        return False
    last, message = items[-1].item, messages[-1]
    is_message = last.type in (None, "message") and last.role == "assistant" and last.status != "completed"
    return is_message and message.role == "assistant" and bool(message.content) and not message.tool_calls


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _text(content: str | list[InputContentPart] | None, path: str) -> str | None:
    if not isinstance(content, list):
        return content
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: InputContentPart, path: str) -> str:
    if part.type not in (*_TEXTS, "refusal"):
        raise errors.unsupported_field(f"{path}.type", "only text parts are served")
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise errors.invalid_field(f"{path}.{name}", "is required")
    return text


class ResponsesFieldNames:
    """The field names of one request."""

    def __init__(self, messages: Sequence[MessagePath], tools: Sequence[str], renamed: Mapping[str, str]) -> None:
        self._messages = messages
        self._tools = tools
        self._name_of = http_errors.by_field({**_RENAMED, **renamed})

    def of(self, param: str) -> str:
        """Returns OpenAI's name of a field."""
        if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self._messages):
            return _in_message(self._messages[int(found[1])], found[2] or "")
        if (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self._tools):
            return self._tools[int(found[1])] + found[2]
        return self._name_of(param)


def _in_message(path: MessagePath, field: str) -> str:
    if field == "content":
        return path.content
    if field == "tool_call_id":
        return f"{path.item}.call_id"
    found = _CALL.fullmatch(field)
    if found and int(found[1]) < len(path.calls):
        inner = _IN_CALL.get(found[2] or "")
        return path.calls[int(found[1])] + (f".{inner}" if inner else "")
    return f"{path.item}.{field}" if field == "role" else path.item


def pack(reasoning: str) -> str:
    """Returns reasoning as an opaque text, for clients that store it in no other form and send it back.

    Nothing is encrypted, although OpenAI calls it so: the same client gets the same text in the item's `content`."""
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unpack(content: str | None) -> str:
    """Returns the reasoning in a text made by `pack`, or an empty text for other servers'."""
    if content is None or not content.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
