"""The public messages of the wire: everything that clients send and receive.

Every struct is frozen. null means absent, unknown fields are ignored. A field whose default is `UNSET` is left out of
the message when it has no value; the others are always present.

The messages of `generate.py` and `cards.py` are exported here too, so that users need not know where each is defined.
"""

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.cards import Card as Card
from tokenbus.protocol.wire.cards import CardAdapter as CardAdapter
from tokenbus.protocol.wire.cards import CardEmbeddings as CardEmbeddings
from tokenbus.protocol.wire.cards import DeviceHealth as DeviceHealth
from tokenbus.protocol.wire.cards import FleetCounts as FleetCounts
from tokenbus.protocol.wire.cards import Load as Load
from tokenbus.protocol.wire.cards import ModelsReply as ModelsReply
from tokenbus.protocol.wire.cards import ModelsRequest as ModelsRequest
from tokenbus.protocol.wire.cards import Pids as Pids
from tokenbus.protocol.wire.cards import PreviousEpoch as PreviousEpoch
from tokenbus.protocol.wire.cards import RefusedCard as RefusedCard
from tokenbus.protocol.wire.cards import RouterStats as RouterStats
from tokenbus.protocol.wire.cards import ServedModel as ServedModel
from tokenbus.protocol.wire.cards import ServerLimits as ServerLimits
from tokenbus.protocol.wire.cards import WorkerCounts as WorkerCounts
from tokenbus.protocol.wire.cards import WorkerHealth as WorkerHealth
from tokenbus.protocol.wire.cards import WorkerRole as WorkerRole
from tokenbus.protocol.wire.cards import WorkerState as WorkerState
from tokenbus.protocol.wire.cards import WorkerTracking as WorkerTracking
from tokenbus.protocol.wire.codec import Message as Message
from tokenbus.protocol.wire.fleet import ClientLimits as ClientLimits
from tokenbus.protocol.wire.fleet import FleetDigest as FleetDigest
from tokenbus.protocol.wire.fleet import FleetRequest as FleetRequest
from tokenbus.protocol.wire.fleet import ModelQueue as ModelQueue
from tokenbus.protocol.wire.fleet import WorkerMemory as WorkerMemory
from tokenbus.protocol.wire.fleet import WorkerNumbers as WorkerNumbers
from tokenbus.protocol.wire.fleet import WorkerSheet as WorkerSheet
from tokenbus.protocol.wire.generate import CacheReply as CacheReply
from tokenbus.protocol.wire.generate import CacheRequest as CacheRequest
from tokenbus.protocol.wire.generate import ChatMessage as ChatMessage
from tokenbus.protocol.wire.generate import ContentPart as ContentPart
from tokenbus.protocol.wire.generate import DetokenizeReply as DetokenizeReply
from tokenbus.protocol.wire.generate import DetokenizeRequest as DetokenizeRequest
from tokenbus.protocol.wire.generate import GenerateRequest as GenerateRequest
from tokenbus.protocol.wire.generate import ResumeFrom as ResumeFrom
from tokenbus.protocol.wire.generate import RoutingOptions as RoutingOptions
from tokenbus.protocol.wire.generate import TokenizeReply as TokenizeReply
from tokenbus.protocol.wire.generate import TokenizeRequest as TokenizeRequest
from tokenbus.protocol.wire.generate import TokenizerInfo as TokenizerInfo
from tokenbus.protocol.wire.generate import TokenPiece as TokenPiece
from tokenbus.protocol.wire.params import TIMEOUT_MS, Range
from tokenbus.protocol.wire.params import CacheControl as CacheControl
from tokenbus.protocol.wire.params import JsonSchema as JsonSchema
from tokenbus.protocol.wire.params import Lora as Lora
from tokenbus.protocol.wire.params import ReasoningOptions as ReasoningOptions
from tokenbus.protocol.wire.params import ResponseFormat as ResponseFormat
from tokenbus.protocol.wire.rate_limits import RateLimit as RateLimit
from tokenbus.protocol.wire.rate_limits import RateLimits as RateLimits
from tokenbus.protocol.wire.traces import RequestTrace as RequestTrace
from tokenbus.protocol.wire.traces import TraceAttempt as TraceAttempt
from tokenbus.protocol.wire.traces import TraceReply as TraceReply
from tokenbus.protocol.wire.traces import TraceRequest as TraceRequest


class FinishReason(enum.StrEnum):
    """Why a stream ended; only its terminal has one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class StoppedBy(enum.StrEnum):
    """Who ended an answer before the model did."""

    OPERATOR = "operator"
    """An operator's `stop`."""
    SHUTDOWN = "shutdown"
    """Its worker was stopped, and no other worker took the stream."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Every sampled token, including the one that ended the completion: the `offset + tokens` of the last chunk."""
    total_tokens: int
    """The sum of both."""
    cached_tokens: int
    """Prompt tokens whose KV was cached and did not have to be computed."""
    reasoning_tokens: int | UnsetType = UNSET
    """Completion tokens that belong to the reasoning, if the answer was parsed."""


class SamplingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters with which the tokens of a request are sampled: its own, and those of the model where it left some
    open."""

    temperature: float
    """Divides the logits before sampling; 0 always takes the likeliest token."""
    top_p: float
    """The same as in the request, like the rest."""
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """The random seed, also where the request gave none."""
    max_tokens: int
    """The most tokens of the completion, within the context."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in ms, counted from the worker's accept."""

    queue_ms: float
    """From the accept to the first step."""
    prefill_ms: float
    """From the first step to the first token."""
    ttft_ms: float
    """From the accept to the first token."""
    decode_ms: float
    """From the first token to the end."""
    total_ms: float
    """From the accept to the end."""
    fetched_tokens: int | UnsetType = UNSET
    """The part of `cached_tokens` that the worker fetched from another one, if it was told to fetch any."""
    fetch_ms: float | UnsetType = UNSET
    """The part of `queue_ms` that the fetch took."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the prompt's computation."""

    prompt_tokens: int
    """Tokens of the prompt."""
    processed_tokens: int
    """Tokens done so far."""
    cached_tokens: int
    """The part of these that was cached and did not have to be computed."""


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
    """The log probability of a sampled token, and of the likeliest tokens at its position."""

    id: int
    """Token id."""
    text: str
    """Its text."""
    bytes: list[int]
    """Its bytes."""
    logprob: float
    """Natural logarithm of its probability."""
    top: list[TokenAlternative]
    """The likeliest tokens at its position."""


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a token of the prompt, given the tokens before it."""

    id: int
    """Token id."""
    text: str
    """Its text."""
    bytes: list[int]
    """Its bytes."""
    logprob: float | None
    """Natural logarithm of its probability; null for the first token of the prompt, which nothing precedes."""
    rank: int | None
    """Its place among all tokens, the likeliest being 1; null where `logprob` is."""
    top: list[TokenAlternative]
    """The likeliest tokens at its position; none for the first token of the prompt."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The values that the router knew of one worker when it made its choice."""

    worker_id: str
    """Name of the worker."""
    cost: float
    """The cost of placing the request there; the lowest was chosen."""
    overlap_blocks: int
    """Leading blocks of the prompt that the worker holds."""
    prefill_blocks: int
    """Blocks that would have to be computed there."""
    decode_blocks: int
    """Blocks held by requests that are being decoded there."""
    state: str
    """State of the worker."""
    fetch_blocks: int = 0
    """The part of `prefill_blocks` that it would fetch from another worker instead."""
    site: str = ""
    """Its site; empty if it was given none."""


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Explains why a worker was chosen."""

    chosen: str
    """Name of the worker."""
    policy: str
    """Name of the policy that chose it."""
    candidates: list[Candidate]
    """All workers that could have been chosen."""
    fetch_from: str = ""
    """Name of the worker from which the chosen one was told to fetch blocks; empty if it was not."""
    has_leg: bool = False
    """Whether that worker was to compute the prompt first."""
    ejected: list[str] = []
    """Names of workers that were passed over because their last requests failed."""


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of a tool call's function."""

    name: str | UnsetType = UNSET
    """The function's name, whole, in the first delta of a call."""
    arguments: str = ""
    """More of the arguments. All those of a complete call, concatenated, are the text of a JSON object."""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or more of one, in the form of OpenAI's chat API."""

    index: int
    """The number of the call among those of the answer, from 0."""
    id: str | UnsetType = UNSET
    """The call's id, in its first delta."""
    type: Literal["function"] | UnsetType = UNSET
    """`function`, in the first delta."""
    arguments_offset: int = 0
    """UTF-8 bytes of the call's arguments before this delta."""
    function: FunctionDelta
    """The called function."""


class Chunk(Message, frozen=True, kw_only=True):
    """One numbered message of a streamed completion; the one with a `finish_reason` is the terminal."""

    id: str
    """The request's id; empty in the refusal of a request whose id could not be read."""
    attempt: int = 0
    """Counts the dispatches of the request to workers. Ignore chunks of a lower attempt than one already seen."""
    offset: int = 0
    """Sampled tokens before this chunk."""
    tokens: int = 0
    """Sampled tokens that this chunk accounts for."""
    text_offset: int = 0
    """UTF-8 bytes of completion text before this chunk; 0 in a chunk that a router itself sends."""
    text: str = ""
    """New text, in whole characters; may be empty."""
    finish_reason: FinishReason | None = None
    """`stop`, `length`, `tool_calls`, `cancelled` or `error` in the terminal, null in all other chunks."""
    worker_id: str | UnsetType | None = UNSET
    """In the head of each attempt, in empty chunks and in the terminal; null if a router sent the chunk."""
    model: str | UnsetType = UNSET
    """In the head of each attempt, in empty chunks and in the terminal."""
    created: int | UnsetType = UNSET
    """Unix time in seconds, in the same chunks."""
    hash_scheme: str | UnsetType = UNSET
    """Names the vocabulary and the model, in a worker's empty chunks; see `resume_from`."""
    token_ids: list[int] | UnsetType = UNSET
    """Ids of the `tokens` tokens, if asked for."""
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    """Log probabilities of the `tokens` tokens, if asked for."""
    prompt_offset: int | UnsetType = UNSET
    """Tokens of the prompt before those of `prompt_logprobs`, in every chunk from a worker if these were asked for; in
    one without any, the position of the next ones. A later attempt may repeat some."""
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET
    """Log probabilities of the next tokens of the prompt, in chunks without tokens, or in the terminal with `stream:
    false`."""
    reasoning_offset: int | UnsetType = UNSET
    """UTF-8 bytes of reasoning before this chunk, if it has reasoning."""
    reasoning: str | UnsetType = UNSET
    """New text of the reasoning, which is not part of `text`."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    """New tool calls, and more of the last one. All of them are complete if the finish reason is `tool_calls`;
    otherwise the last one may be cut off."""
    sampling: SamplingReport | UnsetType = UNSET
    """The parameters of sampling, if asked for: in the head of each attempt and in the terminal."""
    load_progress: float | UnsetType = UNSET
    """The share of the model that is loaded, 0 to 1, in empty chunks that are sent while a worker loads it."""
    progress: Progress | UnsetType = UNSET
    """Progress of the prompt's computation, if asked for."""
    usage: Usage | UnsetType = UNSET
    """Token counts, in every terminal except a refusal."""
    rate_limits: RateLimits | UnsetType = UNSET
    """The limits of the client and how much of them is left, in the head, and in the terminal with `stream: false`, if
    its key or its tenant has any."""
    timings: Timings | UnsetType = UNSET
    """Durations, in every terminal except a refusal."""
    stop_match: str | int | UnsetType = UNSET
    """The stop string or token id that matched, in a terminal with `stop`."""
    stopped_by: StoppedBy | UnsetType = UNSET
    """`operator` or `shutdown`, in a terminal with `length` that came before `max_tokens`: the answer was ended by an
    operator, or because its worker was stopped and no other took the stream."""
    error: errors.Error | UnsetType = UNSET
    """Why the request failed, in a terminal with `error`."""
    routing: RoutingReport | UnsetType = UNSET
    """Why the worker was chosen, in the terminal, if asked for."""


class CancelReply(Message, frozen=True, kw_only=True):
    """Sent by the router or worker that carries out a cancel."""

    cancelled: bool
    """Always true: an unknown id gets no answer."""


class ResyncRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for everything from a token on to be published again."""

    offset: int
    """Sampled tokens that the client already has."""
    prompt_offset: int | None = None
    """The `prompt_offset` that the next `prompt_logprobs` should have; if absent, none of them are published again."""


class ResyncReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by the router or worker that holds the stream."""

    found: bool
    """Always true: an unknown id gets no answer."""
    error: errors.Error | None = None
    """Why nothing is published again, if the resync could not be read or its offset is not a number of tokens."""


class UploadReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by the receiver of a large message, in answer to its announcement and to each part but the last."""

    upload: str | None = None
    """The subject for the parts."""
    received: int = 0
    """Bytes received so far."""
    error: errors.Error | None = None
    """Why the message can't be taken."""


class EmbedRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for embeddings of one or several inputs, as text or as token ids."""

    id: str | None = None
    """Like the id of a `generate` request."""
    input: str | list[str | list[int]] | None = None
    """A string, or a list whose items are strings or lists of token ids."""
    dimensions: int | None = None
    """Length of the vectors, if the model can shorten them."""
    encoding: Literal["float", "base64"] | None = None
    """`float`: lists of numbers. `base64`: 32-bit little-endian floats in base64."""
    normalize: bool | None = None
    """Whether the vectors are scaled to unit length. true if absent."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to its answer. 60,000 if absent."""


class EmbedReply(Message, frozen=True, kw_only=True):
    """The embeddings of all inputs, or the error."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """The model that made them."""
    embeddings: list[list[float] | str] | UnsetType = UNSET
    """One vector for each input, in their order."""
    usage: Usage | UnsetType = UNSET
    """Tokens of all inputs."""
    rate_limits: RateLimits | UnsetType = UNSET
    """The limits of the client and how much of them is left, if its key or its tenant has any."""
    error: errors.Error | UnsetType = UNSET
    """Why there are no embeddings."""


class RerankRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks how relevant documents are to a query."""

    id: str | None = None
    """Like the id of a `generate` request."""
    query: str | None = None
    """The query."""
    documents: list[str] | None = None
    """The documents."""
    top_n: Annotated[int | None, Range(1, limits.MAX_TOKENS)] = None
    """The number of results; one for each document if absent."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to its answer. 60,000 if absent."""


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place in the order."""

    index: int
    """The number of the document in the request, from 0."""
    relevance_score: float
    """The score that the model computed for it: higher is more relevant."""


class RerankReply(Message, frozen=True, kw_only=True):
    """The documents in the order of their scores, or the error."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """The model that scored them."""
    results: list[RankedDocument] | UnsetType = UNSET
    """The most relevant document first; of equal scores, the earlier document."""
    usage: Usage | UnsetType = UNSET
    """Tokens of all documents, each with the query."""
    rate_limits: RateLimits | UnsetType = UNSET
    """The limits of the client and how much of them is left, if its key or its tenant has any."""
    error: errors.Error | UnsetType = UNSET
    """Why there are no results."""
