"""The JSON objects of OpenAI's API, with its names, and null where its clients expect null."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an error response, and the last event but one of a failed stream."""

    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ReportedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a prompt's computation, in llama-server's form."""

    total: int
    cache: int
    """Tokens that were cached."""
    processed: int
    """Tokens done so far, cached ones included."""
    time_ms: int
    """Since the request was received."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatCompletionTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatCompletionTokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The function named by a tool call, or more of its arguments."""

    name: str | None = None
    arguments: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or the next piece of one."""

    index: int | UnsetType = UNSET
    """Only in streams."""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatCompletionMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a chat completion."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None
    """Not OpenAI's, but the name used by servers of open models."""
    reasoning: str | None
    """The same text under the other common name."""
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: ChatCompletionMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    """vLLM's, if requested."""


class PromptTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a token at a position of the prompt."""

    logprob: float
    rank: int
    """Its place among all tokens, the likeliest being 1."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""For each position, the log probabilities of its token and of the likeliest ones, by token id; null for the first."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The response to an unstreamed request."""

    id: str
    object: str = "chat.completion"
    created: int
    """Unix seconds."""
    model: str
    choices: list[Choice]
    usage: CompletionUsage | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """vLLM's, if requested, like the next one."""
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of a streamed message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """Not OpenAI's, but the name used by servers of open models."""
    reasoning: str | UnsetType = UNSET
    """The same text under the other common name."""
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    """vLLM's, if requested: those of the tokens since the last event."""


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed response."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    """Unix seconds."""
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    """Only if requested: null, until the numbers follow in a separate event at the end."""
    prompt_progress: ReportedProgress | UnsetType = UNSET
    """In events about the prompt's progress, if requested."""
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first event of an answer, if requested."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """vLLM's, if requested: those of the next tokens of the prompt, in the events before the answer."""
