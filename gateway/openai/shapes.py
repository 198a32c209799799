"""The JSON that OpenAI's clients expect to receive. Names and nulls are theirs."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is an error, and the last event but one of a stream that fails."""

    error: ErrorDetail


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a whole answer."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: Said
    logprobs: Logprobs | None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    """Unix seconds."""
    model: str
    choices: list[Choice]
    usage: Usage | None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class DeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    """Unix seconds."""
    model: str
    choices: list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    """Only when asked for: null, and the numbers in an event of their own at the end."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    """Unix seconds: since when a worker has served it."""
    owned_by: str = "tokenbus"
    context_length: int
    """Ours: tokens of a prompt and its completion together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]
