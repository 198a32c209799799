"""The JSON objects of Anthropic's API, with its names."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The body of an error response, and the last event of a failed stream."""

    error: AnthropicErrorDetail
    request_id: str | None


class AnthropicOutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request. Those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails | UnsetType = UNSET


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """The response to an unstreamed request and, without content, the first event of a stream."""

    id: str
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    """null only in a stream."""
    stop_sequence: str | None
    usage: AnthropicUsage


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class ContentBlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag="message_delta"):
    """Ends the message, with the token counts of all of it."""

    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag="message_stop"):
    """The last event of a successful stream."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Keeps the connection alive while nothing is generated."""


StreamEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorBody
)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    id: str
    display_name: str
    created_at: str
    """RFC 3339: when the oldest of its workers started."""
    lifecycle: str = "active"
    max_input_tokens: int
    """The maximum number of tokens of a prompt and its completion together, as below."""
    max_tokens: int


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """The models, always on one page."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class MessageTokensCount(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a request to count tokens."""

    input_tokens: int
