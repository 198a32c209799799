"""The public messages of the wire: what clients send and what they receive.

Every struct is frozen. null means absent, unknown fields are ignored. A field whose default is `UNSET` is left out of
the message when it has nothing to say; the others are always present.

Those of `generate` and `cards` are named here too: who uses messages need not know in which file each is.
"""

import enum
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.cards import (
    Card,
    Load,
    ModelsReply,
    Pids,
    RefusedCard,
    RouterStats,
    ServedModel,
    ServerLimits,
    WorkerState,
    WorkerTracking,
)
from tokenbus.protocol.wire.generate import (
    ChatMessage,
    ContentPart,
    GenerateRequest,
    Lora,
    ResponseFormat,
    ResumeFrom,
    RoutingOptions,
)
from tokenbus.protocol.wire.message import Message

__all__ = [
    "CancelReply",
    "Candidate",
    "Card",
    "ChatMessage",
    "Chunk",
    "ContentPart",
    "EmbedReply",
    "EmbedRequest",
    "FinishReason",
    "GenerateRequest",
    "Load",
    "Lora",
    "Message",
    "ModelsReply",
    "Pids",
    "Progress",
    "RefusedCard",
    "ResponseFormat",
    "ResumeFrom",
    "ResyncReply",
    "ResyncRequest",
    "RouterStats",
    "RoutingOptions",
    "RoutingReport",
    "ServedModel",
    "ServerLimits",
    "Timings",
    "TokenAlternative",
    "TokenLogprob",
    "Usage",
    "WorkerState",
    "WorkerTracking",
]


class FinishReason(enum.StrEnum):
    """Why a stream ended; only its terminal has one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; `completion_tokens` counts every sampled token, the end token included."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Every sampled token, the one that ended it included: the last `offset + tokens`."""
    total_tokens: int
    """Both."""
    cached_tokens: int
    """Prompt tokens whose KV was there already."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in ms, from the worker's accept on."""

    queue_ms: float
    """From the accept to the first step."""
    prefill_ms: float
    """From there to the first token."""
    ttft_ms: float
    """Both: to the first token."""
    decode_ms: float
    """From the first token to the end."""
    total_ms: float
    """From the accept to the end."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt has been computed."""

    prompt_tokens: int
    """All there are."""
    processed_tokens: int
    """Computed so far."""
    cached_tokens: int
    """Of these, not computed but found."""


class TokenAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have been sampled, and its log probability."""

    id: int
    """Token id."""
    text: str
    """Its text."""
    bytes: list[int]
    """Its bytes."""
    logprob: float
    """Natural logarithm of its probability."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a sampled token, and of the likeliest ones at its place."""

    id: int
    """Token id."""
    text: str
    """Its text."""
    bytes: list[int]
    """Its bytes."""
    logprob: float
    """Natural logarithm of its probability."""
    top: list[TokenAlternative]
    """The likeliest at its place."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knew of one worker when it chose."""

    worker_id: str
    """Which worker."""
    cost: float
    """The lowest was chosen."""
    overlap_blocks: int
    """Leading blocks of the prompt that it holds."""
    prefill_blocks: int
    """Blocks to be computed there."""
    decode_blocks: int
    """Blocks that are being decoded there."""
    state: str
    """Its state."""


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker was chosen."""

    chosen: str
    """Which worker."""
    policy: str
    """By which policy."""
    candidates: list[Candidate]
    """All that could have been."""


class Chunk(Message, frozen=True, kw_only=True):
    """One numbered piece of a streamed completion; the one with a `finish_reason` is the terminal."""

    id: str
    """The request's id; empty in a refusal whose id could not be read."""
    attempt: int = 0
    """0, and one higher at every dispatch to a worker. Ignore chunks of a lower attempt than one already seen."""
    offset: int = 0
    """Sampled tokens before this chunk."""
    tokens: int = 0
    """Sampled tokens that this chunk accounts for."""
    text_offset: int = 0
    """UTF-8 bytes of completion text before this chunk."""
    text: str = ""
    """New text: whole characters, may be empty."""
    finish_reason: FinishReason | None = None
    """null, or in the terminal, and only there, one of `stop` `length` `tool_calls` `cancelled` `error`."""
    worker_id: str | UnsetType | None = UNSET
    """In the head of each attempt, empty chunks and the terminal; null where a router speaks."""
    model: str | UnsetType = UNSET
    """Likewise."""
    created: int | UnsetType = UNSET
    """Unix seconds."""
    token_ids: list[int] | UnsetType = UNSET
    """When asked for: exactly `tokens` of them."""
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    """When asked for: exactly `tokens` of them."""
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    """When tools were given."""
    progress: Progress | UnsetType = UNSET
    """When asked for, while the prompt is computed."""
    usage: Usage | UnsetType = UNSET
    """In the terminal, unless it is a refusal."""
    timings: Timings | UnsetType = UNSET
    """In the terminal, unless it is a refusal."""
    stop_match: str | int | UnsetType = UNSET
    """In a terminal with `stop`: the stop text or token id that matched."""
    error: errors.Error | UnsetType = UNSET
    """In a terminal with `error`."""
    routing: RoutingReport | UnsetType = UNSET
    """In the terminal, when it was asked for."""


class CancelReply(Message, frozen=True, kw_only=True):
    """Sent by whoever carries out a cancel."""

    cancelled: bool
    """Always true: nobody answers for an unknown id."""


class ResyncRequest(Message, frozen=True, kw_only=True):
    """Asks for everything from that sampled token on, published again."""

    offset: int
    """Sampled tokens that the client holds."""


class ResyncReply(Message, frozen=True, kw_only=True):
    """Sent by whoever holds the stream."""

    found: bool
    """Always true: nobody answers for an unknown id."""


class EmbedRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for embeddings of one or several inputs, as text or as token ids."""

    id: str | None = None
    """As in `generate`."""
    input: str | list[str | list[int]] | None = None
    """A text, texts, or lists of token ids."""
    dimensions: int | None = None
    """Length of the vectors, where the model can shorten them."""
    encoding: Literal["float", "base64"] | None = None
    """`float` or `base64`."""
    normalize: bool | None = None
    """To unit length; true where absent."""
    timeout_ms: float | None = None
    """60,000 where absent."""


class EmbedReply(Message, frozen=True, kw_only=True):
    """The embeddings, one for each input, or the error."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """Who made them."""
    embeddings: list[list[float] | str] | UnsetType = UNSET
    """One for each input."""
    usage: Usage | UnsetType = UNSET
    """Tokens of all inputs."""
    error: errors.Error | UnsetType = UNSET
    """Instead of all else."""
