"""The public messages of the wire: what clients send and what they receive.

Every struct is frozen. null means absent, unknown fields are ignored. A field whose default is `UNSET` is left out of
the message when it has nothing to say; the others are always present.
"""

import enum
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from protocol import errors


class FinishReason(enum.StrEnum):
    """Why a stream ended; only its terminal has one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that is sent as one NATS message."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a chat message's content; `type` must be `text`."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, as in OpenAI's chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for constrained output; `text` asks for nothing."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter loaded on the model, and how strongly it acts."""

    name: str
    scale: float = 1.0


class ResumeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What a client already holds of a completion: its sampled tokens and how many bytes of its text."""

    token_ids: list[int]
    text_offset: int


class RoutingWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins a request to a worker, overrides the policy by name, or asks why a worker was chosen."""

    worker_id: str | None = None
    policy: str | None = None
    explain: bool | None = None


class GenerateRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a completion; exactly one of `messages`, `prompt` and `token_ids`. Ranges: protocol/request.py."""

    id: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str | int, float] | None = None
    logprobs: int | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    lora: list[Lora] | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    timeout_ms: float | None = None
    stream: bool | None = None
    resume_from: ResumeFrom | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    routing: RoutingWish | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; `completion_tokens` counts every sampled token, the end token included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in ms, from the worker's accept on."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    total_ms: float


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt has been computed."""

    prompt_tokens: int
    processed_tokens: int
    cached_tokens: int


class TokenAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have been sampled, and its log probability."""

    id: int
    text: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a sampled token, and of the likeliest ones at its place."""

    id: int
    text: str
    bytes: list[int]
    logprob: float
    top: list[TokenAlternative]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knew of one worker when it chose."""

    worker_id: str
    cost: float
    overlap_blocks: int
    prefill_blocks: int
    decode_blocks: int
    state: str


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker was chosen."""

    chosen: str
    policy: str
    candidates: list[Candidate]


class Chunk(Message, frozen=True, kw_only=True):
    """One numbered piece of a streamed completion; the one with a `finish_reason` is the terminal."""

    id: str
    attempt: int = 0
    offset: int = 0
    """Sampled tokens before this chunk."""
    tokens: int = 0
    """Sampled tokens that this chunk accounts for."""
    text_offset: int = 0
    """UTF-8 bytes of completion text before this chunk."""
    text: str = ""
    finish_reason: FinishReason | None = None
    worker_id: str | UnsetType | None = UNSET
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    """Unix seconds."""
    token_ids: list[int] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    progress: Progress | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    stop_match: str | int | UnsetType = UNSET
    error: errors.Error | UnsetType = UNSET
    routing: RoutingReport | UnsetType = UNSET


class CancelReply(Message, frozen=True, kw_only=True):
    """Sent by whoever carries out a cancel."""

    cancelled: bool


class ResyncRequest(Message, frozen=True, kw_only=True):
    """Asks for everything from that sampled token on, published again."""

    offset: int


class ResyncReply(Message, frozen=True, kw_only=True):
    """Sent by whoever holds the stream."""

    found: bool


class EmbedRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for embeddings of one or several inputs, as text or as token ids."""

    id: str | None = None
    input: str | list[str | list[int]] | None = None
    dimensions: int | None = None
    encoding: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    timeout_ms: float | None = None


class EmbedReply(Message, frozen=True, kw_only=True):
    """The embeddings, one for each input, or the error."""

    id: str
    model: str | UnsetType = UNSET
    embeddings: list[list[float] | str] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    error: errors.Error | UnsetType = UNSET


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    generated_tokens: int = 0
    """Tokens sampled since the engine started."""
    step_age_ms: float = 0.0
    """Time since the step in progress began; 0 while idle."""


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """Operating-system process ids of a worker's two processes; `engine` is 0 while there is none."""

    front: int
    engine: int


class WorkerState(enum.StrEnum):
    """What a worker can do for a router now."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Its engine died and a new one is being started."""
    DRAINING = "draining"
    STOPPED = "stopped"
    """Its last word: it has withdrawn."""


class Card(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's description of itself."""

    worker_id: str
    epoch: str
    model: str
    source: str
    engine: str
    engine_version: str
    context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    hash_scheme: str
    features: list[str]
    state: WorkerState
    host: str
    pids: Pids
    versions: dict[str, str]
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    tokenizer_digest: str | None = None
    """Absent: the worker offers no tokenizer bundle; ask it to tokenize."""
    adapters: list[str] = []
    role: str = "both"
    load: Load | None = None
    """Only in a `models` reply."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model, and the workers that serve it."""

    model: str
    context_length: int
    features: list[str]
    workers: list[Card] | UnsetType = UNSET


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_request_bytes: int


class ModelsReply(Message, frozen=True, kw_only=True):
    """What is being served; `truncated` when the workers had to be left out to fit a message."""

    models: list[ServedModel]
    limits: ServerLimits
    truncated: bool | UnsetType = UNSET
