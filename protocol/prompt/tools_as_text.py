"""Writes tools, calls and their results as plain text, for chat templates that have no place for them.

The notation is that of Hermes, which more models were trained on than on any other: a model that knows none of it still
has an example in its prompt, and a grammar that holds it to the form."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenbus.protocol.prompt.history import MessageDict

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"


def as_text(
    conversation: Sequence[MessageDict],
    tools: Sequence[dict[str, Any]],
    to_json: Callable[[object], str],
    *,
    takes_system: bool,
) -> list[MessageDict]:
    """Returns a conversation of plain messages: the tools in its first system message, or in the first message of the
    user if the template `takes_system` messages not; calls in the assistant's text, and results as the user's."""
    plain = list(_plain(conversation, to_json))
    if not tools:
        return plain
    told = _told(tools, to_json)
    first = plain[0]["role"] if plain else ""
    if first in _SYSTEM:
        return [plain[0] | {"content": _joined(plain[0]["content"], told)}, *plain[1:]]
    if takes_system:
        return [{"role": "system", "content": told}, *plain]
    if first == "user":
        return [plain[0] | {"content": _joined(told, plain[0]["content"])}, *plain[1:]]
    return [{"role": "user", "content": told}, *plain]


def _told(tools: Sequence[dict[str, Any]], to_json: Callable[[object], str]) -> str:
    listed = "\n".join(to_json(tool["function"]) for tool in tools)
    return (
        f"These functions can be called, each described as JSON:\n{listed}\n\n"
        "To call one, answer with its name and its arguments as a JSON object between tags, as in this example, and "
        f'wait for the result:\n{CALL_OPEN}\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n{CALL_CLOSE}'
    )


def _plain(conversation: Sequence[MessageDict], to_json: Callable[[object], str]) -> Iterator[MessageDict]:
    """Yields messages without calls and results. Results that follow each other, and the user's words after them, are
    one message, since many templates want user and assistant to alternate."""
    results: MessageDict | None = None
    for message in conversation:
        if message["role"] == "tool":
            result = f"{RESULT_OPEN}\n{message['content']}\n{RESULT_CLOSE}"
            before = "" if results is None else results["content"]
            results = {"role": "user", "content": f"{before}\n{result}" if before else result}
            continue
        if results is not None and message["role"] == "user":
            message = message | {"content": _joined(results["content"], message["content"])}
        elif results is not None:
            yield results
        results = None
        yield _with_calls(message, to_json)
    if results is not None:
        yield results


def _with_calls(message: MessageDict, to_json: Callable[[object], str]) -> MessageDict:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    written = [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
    text = "\n".join(f"{CALL_OPEN}\n{to_json(one)}\n{CALL_CLOSE}" for one in written)
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": f"{message['content']}\n{text}" if message["content"] else text}


def _joined(first: str, second: str) -> str:
    return f"{first}{_BETWEEN}{second}" if first and second else first or second
