"""Translates the wire's field names into those of the Responses API."""

import re
from collections.abc import Mapping, Sequence

from tokenbus.gateway.openai.responses.input_items import MessagePath

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


class ResponsesFieldNames:
    """The field names of one request."""

    def __init__(self, messages: Sequence[MessagePath], tools: Sequence[str], renamed: Mapping[str, str]) -> None:
        self._messages = messages
        self._tools = tools
        self._renamed = {**_RENAMED, **renamed}

    def __repr__(self) -> str:
        return f"<ResponsesFieldNames of {len(self._messages)} messages, {len(self._tools)} tools>"

    def of(self, param: str) -> str:
        """Returns OpenAI's name of a field."""
        if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self._messages):
            return _in_message(self._messages[int(found[1])], found[2] or "")
        if (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self._tools):
            return self._tools[int(found[1])] + found[2]
        return self._renamed.get(param, param)


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
