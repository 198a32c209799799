"""Turns a conversation of content blocks into wire messages, and the wire's field names back into those of blocks.

One message in Anthropic's API may become several on the wire (tool results are blocks of the user's message), and
several may become one: adjacent messages with the same role are joined, since many templates insist on alternating
roles."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.errors import invalid_field

IGNORED_LINES = "x-anthropic-billing-header:"
"""The prefix of lines in system prompts that differ in each request: with them, no prompt would ever be cached."""
_BETWEEN_BLOCKS = "\n\n"
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^continue_final_message$", "messages"),
        (r"^stop(?=\[|$)", "stop_sequences"),
        (r"^response_format\.json_schema\.schema", "output_config.format.schema"),
        (r"^response_format(\.json_schema)?", "output_config.format"),
        (r"^reasoning\.max_tokens$", "thinking.budget_tokens"),
        (r"^reasoning\.effort$", "output_config.effort"),
        (r"^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
        (r"^tool_choice\.function", "tool_choice"),
        (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function", r"\1"),
        (r"\[(\d+)\]", r".\1"),
    )
]
_OF_MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.(content|tool_calls)\[(\d+)\])?(.*)$")
_OF_TOOL = re.compile(r"^tools\[(\d+)\]")
_IN_MESSAGE = {
    ".function.arguments": ".input",
    ".function.name": ".name",
    ".function": "",
    ".tool_call_id": ".tool_use_id",
    ".tool_calls": "",
}


class CacheBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Says that the prompt up to this point is worth keeping."""

    type: Literal["ephemeral"] | None = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None
    """None means five minutes."""

    @property
    def ttl_ms(self) -> float:
        return 3_600_000.0 if self.ttl == "1h" else 300_000.0


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A content block. Its type determines which of the fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    cache_control: CacheBreakpoint | None = None


Content = str | list[ContentBlock]


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the request."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Turn(NamedTuple):
    """A wire message, and the paths of its sources."""

    message: wire.ChatMessage
    path: str
    part_paths: Sequence[str] = ()
    """The path of each part of its content."""
    call_paths: Sequence[str] = ()
    """The path of each of its tool calls."""


class _Placed(NamedTuple):
    block: ContentBlock
    path: str


def to_turns(system: Content | None, conversation: Sequence[InputMessage]) -> list[Turn]:
    """Returns the wire messages. Leading system messages are joined with `system`.

    Later ones become text in the user's turn, since most templates don't support them there. Raises RequestError for a
    system prompt that is not text."""
    count = next((number for number, one in enumerate(conversation) if one.role != "system"), len(conversation))
    texts = [] if system is None else _system_texts(system, "system")
    for number, one in enumerate(conversation[:count]):
        texts += _system_texts(one.content, f"messages.{number}.content")
    turns = [Turn(wire.ChatMessage(role="system", content=_BETWEEN_BLOCKS.join(texts)), "system")] if texts else []
    placed = [
        (one.role == "assistant", number, _placed(one, f"messages.{number}.content"))
        for number, one in enumerate(conversation[count:], count)
    ]
    for is_assistant, run in itertools.groupby(placed, lambda one: one[0]):
        members = list(run)
        path = f"messages.{members[0][1]}"
        blocks = [block for _, _, found in members for block in found]
        turns += [_assistant_turn(blocks, path)] if is_assistant else _user_turns(blocks, path)
    return turns


def cache_ttl_ms(system: Content | None, conversation: Sequence[InputMessage]) -> float:
    """Returns the longest time for which any part of a conversation is to be cached; 0 if none is."""
    contents = [content for content in (system, *(one.content for one in conversation)) if isinstance(content, list)]
    blocks = [block for content in contents for block in content]
    blocks += [inner for block in blocks if isinstance(block.content, list) for inner in block.content]
    return max((one.cache_control.ttl_ms for one in blocks if one.cache_control is not None), default=0.0)


def _placed(message: InputMessage, path: str) -> list[_Placed]:
    if message.role == "system":
        return [
            _Placed(ContentBlock(type="text", text=f"<system-reminder>\n{text}\n</system-reminder>"), path)
            for text in _system_texts(message.content, path)
        ]
    return _blocks(message.content, path)


def _blocks(content: Content | None, path: str) -> list[_Placed]:
    if content is None or isinstance(content, str):
        return [_Placed(ContentBlock(type="text", text=content), path)] if content else []
    return [_Placed(block, f"{path}.{number}") for number, block in enumerate(content)]


def _system_texts(content: Content, path: str) -> list[str]:
    """Returns the non-empty texts of a system prompt, without ignored lines."""
    texts = []
    for block, place in _blocks(content, path):
        if block.type != "text":
            raise invalid_field(f"{place}.type", f"must be text, got {block.type[:100]!r}")
        if block.text is None:
            raise invalid_field(f"{place}.text", "is required")
        text = block.text
        if IGNORED_LINES in text:
            lines = text.splitlines(keepends=True)
            text = "".join(line for line in lines if not line.lstrip().startswith(IGNORED_LINES))
        texts += [text] if text.strip() else []
    return texts


def _user_turns(blocks: Sequence[_Placed], path: str) -> list[Turn]:
    """Returns tool results, and then what the user says."""
    turns = [_result_turn(one) for one in blocks if one.block.type == "tool_result"]
    said = [one for one in blocks if one.block.type != "tool_result"]
    if said or not turns:
        message = wire.ChatMessage(role="user", content=_content(said))
        turns.append(Turn(message, path, [place for _, place in said]))
    return turns


def _result_turn(placed: _Placed) -> Turn:
    block, path = placed
    blocks = _blocks(block.content, f"{path}.content")
    content = _content(blocks)
    if block.is_error and isinstance(content, str):
        content = f"Error: {content}"  # templates have no other place for it
    message = wire.ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)
    return Turn(message, path, [place for _, place in blocks])


def _assistant_turn(blocks: Sequence[_Placed], path: str) -> Turn:
    calls = [one for one in blocks if one.block.type == "tool_use"]
    thoughts = [one.block.thinking for one in blocks if one.block.type == "thinking" and one.block.thinking]
    said = [one for one in blocks if one.block.type not in ("tool_use", "thinking", "redacted_thinking")]
    message = wire.ChatMessage(
        role="assistant",
        content=_content(said) if said or not calls else None,
        reasoning_content=_BETWEEN_BLOCKS.join(thoughts) or None,
        tool_calls=[_call(block) for block, _ in calls] or None,
    )
    return Turn(message, path, [place for _, place in said], [place for _, place in calls])


def _call(block: ContentBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}


def _content(blocks: Sequence[_Placed]) -> str | list[wire.ContentPart]:
    """Returns the joined texts of blocks or, if some are not text, parts that validation will refuse."""
    texts = [block.text for block, _ in blocks if block.type == "text" and block.text is not None]
    if len(texts) == len(blocks):
        return _BETWEEN_BLOCKS.join(text for text in texts if text)
    return [wire.ContentPart(type=block.type, text=block.text) for block, _ in blocks]


class AnthropicFieldNames:
    """The field names of one request."""

    def __init__(self, turns: Sequence[Turn] = (), tool_numbers: Sequence[int] = ()) -> None:
        """`tool_numbers` are the positions of the wire's tools in the request, which may also have others."""
        self._turns = turns
        self._tool_numbers = tool_numbers

    def of(self, param: str) -> str:
        """Returns the name of a field, unchanged if it is already Anthropic's."""
        match = _OF_MESSAGE.match(param)
        if match and int(match[1]) < len(self._turns):
            return self._in_turn(self._turns[int(match[1])], match)
        tool = _OF_TOOL.match(param)
        if tool and int(tool[1]) < len(self._tool_numbers):
            param = f"tools[{self._tool_numbers[int(tool[1])]}]{param[tool.end() :]}"
        for pattern, replacement in _RULES:
            param = pattern.sub(replacement, param)
        return param

    def _in_turn(self, turn: Turn, match: "re.Match[str]") -> str:
        rest = _IN_MESSAGE.get(match[4], match[4])
        if match[2] is None:
            return turn.path + rest
        places = turn.part_paths if match[2] == "content" else turn.call_paths
        return places[int(match[3])] + rest
