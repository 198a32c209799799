"""Turns the parts of an answer into the output items of a response: reasoning, messages and calls."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.generation.answer_events import AnswerPart, PartKind
from tokenbus.gateway.openai import schemas
from tokenbus.gateway.openai.chat_response import logprobs_of
from tokenbus.gateway.openai.responses import custom_input, encrypted_content
from tokenbus.gateway.openai.responses.tools import OfferedTools, ResponsesTool

Status = Literal["in_progress", "completed", "incomplete"]
_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.TOOL_CALL: "fc"}


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[schemas.ChatCompletionTokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[None] = []
    """Always empty: the reasoning is not summarized; it is in `content`."""
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET
    """Only if requested."""


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class OutputItems:
    """Makes the items of one response."""

    def __init__(self, request_id: str, tools: OfferedTools, *, with_encrypted_content: bool) -> None:
        self._request_id = request_id
        self._tools = tools
        self._with_encrypted_content = with_encrypted_content

    def __repr__(self) -> str:
        return f"<OutputItems of {self._request_id}>"

    def id(self, part: AnswerPart) -> str:
        """Returns the id of a part's item."""
        prefix = "ctc" if self.is_custom(part) else _PREFIXES[part.kind]
        return f"{prefix}_{self._request_id}_{part.index}"

    def is_custom(self, part: AnswerPart) -> bool:
        """Whether a part is the call of a custom tool."""
        return part.kind is PartKind.TOOL_CALL and self._tools.called(part.name).is_custom

    def begun(self, part: AnswerPart) -> OutputItem:
        """Returns the item of a part that has just begun, without content."""
        match part.kind:
            case PartKind.REASONING:
                return ReasoningItem(id=self.id(part), status="in_progress", content=[])
            case PartKind.TEXT:
                return MessageItem(id=self.id(part), status="in_progress", content=[])
            case PartKind.TOOL_CALL:
                return self._call(part, "", "in_progress")

    def whole(self, part: AnswerPart, *, is_cut: bool = False) -> OutputItem:
        """Returns the item of a part that has ended; `is_cut`: it was cut off."""
        status: Status = "incomplete" if is_cut else "completed"
        match part.kind:
            case PartKind.REASONING:
                packed = encrypted_content.pack(part.text) if self._with_encrypted_content else UNSET
                content = [ReasoningText(text=part.text)]
                return ReasoningItem(id=self.id(part), status=status, content=content, encrypted_content=packed)
            case PartKind.TEXT:
                return MessageItem(id=self.id(part), status=status, content=[output_text(part)])
            case PartKind.TOOL_CALL:
                return self._call(part, part.text, status)

    def _call(self, part: AnswerPart, arguments: str, status: Status) -> FunctionCallItem | CustomToolCallItem:
        tool: ResponsesTool = self._tools.called(part.name)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return CustomToolCallItem(
                id=self.id(part),
                status=status,
                call_id=part.call_id,
                name=tool.name,
                namespace=namespace,
                input=custom_input.input_of(arguments),
            )
        return FunctionCallItem(
            id=self.id(part),
            status=status,
            call_id=part.call_id,
            name=tool.name,
            namespace=namespace,
            arguments=arguments,
        )


def output_text(part: AnswerPart) -> OutputText:
    """Returns the text of a message, with its log probabilities."""
    return OutputText(text=part.text, logprobs=text_logprobs(part))


def text_logprobs(part: AnswerPart, start: int = 0) -> list[schemas.ChatCompletionTokenLogprob]:
    """Returns the log probabilities of a part's tokens, from token `start` on."""
    found = logprobs_of(part.logprobs[start:])
    return found.content if found else []
