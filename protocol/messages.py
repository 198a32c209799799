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
    """`text`; other kinds are refused as `unsupported`."""
    text: str | None = None
    """The part's text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, as in OpenAI's chat."""

    role: str
    """`system`, `user`, `assistant`, or whatever the model's template knows."""
    content: str | list[ContentPart] | None = None
    """A text, or a list of text parts."""
    name: str | None = None
    """Passed to the template."""
    tool_calls: list[dict[str, Any]] | None = None
    """Passed to the template."""
    tool_call_id: str | None = None
    """Passed to the template."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for constrained output; `text` asks for nothing."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`, `json_object` or `json_schema`."""
    json_schema: dict[str, Any] | None = None
    """With `json_schema`: the schema."""


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter loaded on the model, and how strongly it acts."""

    name: str
    """Name under which the adapter was loaded."""
    scale: float = 1.0
    """Factor on its weights."""


class ResumeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What a client already holds of a completion: its sampled tokens and how many bytes of its text."""

    token_ids: list[int]
    """Every sampled token received."""
    text_offset: int
    """UTF-8 bytes of text held."""


class RoutingWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins a request to a worker, overrides the policy by name, or asks why a worker was chosen."""

    worker_id: str | None = None
    """Only this worker."""
    policy: str | None = None
    """Name of a policy: `least_loaded`, `round_robin`."""
    explain: bool | None = None
    """Ask for `routing` in the terminal."""


class GenerateRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a completion; exactly one of `messages`, `prompt` and `token_ids`. Ranges: protocol/request.py."""

    id: str | None = None
    """1 to 128 of `A-Za-z0-9_-`, unique in its tenant while in flight; made by the router where absent."""
    messages: list[ChatMessage] | None = None
    """A conversation, rendered with the model's chat template; at most 4,096 turns."""
    prompt: str | None = None
    """A text, used as it is; nothing in it is a special token."""
    token_ids: list[int] | None = None
    """A prompt that is tokenized already, used as it is."""
    max_tokens: int | None = None
    """At least 1. Absent: the model's own, else what the context leaves, at most the worker's `--max-new-tokens`."""
    min_tokens: int | None = None
    """No stop before so many; 0 where absent."""
    temperature: float | None = None
    """0 to 100; 0 is greedy. Absent: the model's, else 0.7."""
    top_p: float | None = None
    """Above 0, up to 1. Absent: the model's, else 0.9."""
    top_k: int | None = None
    """From 0, which is off. Absent: the model's, else 40."""
    min_p: float | None = None
    """0 to 1. Absent: the model's, else 0."""
    repetition_penalty: float | None = None
    """0.01 to 10; 1 changes nothing."""
    repetition_last_n: int | None = None
    """Tokens that the penalties look back; 64 where absent."""
    presence_penalty: float | None = None
    """-2 to 2; 0 changes nothing."""
    frequency_penalty: float | None = None
    """-2 to 2; 0 changes nothing."""
    seed: int | None = None
    """0 to 4,294,967,295; repeats the same answer for the same request alone on the same build."""
    stop: str | list[str] | None = None
    """Texts that end the completion and are not part of it: one or up to 16, each of 1 to 1,024 bytes."""
    stop_token_ids: list[int] | None = None
    """Beside the model's own end tokens; at most 128."""
    ignore_eos: bool | None = None
    """Go on behind the model's end tokens."""
    logit_bias: dict[str | int, float] | None = None
    """By token id, as a decimal text or in MessagePack also as a number."""
    logprobs: int | None = None
    """0 to 20 alternatives for each token."""
    response_format: ResponseFormat | None = None
    """Constrained output."""
    grammar: str | None = None
    """Constrained output, as a GBNF text."""
    tools: list[dict[str, Any]] | None = None
    """As in OpenAI's chat."""
    tool_choice: str | dict[str, Any] | None = None
    """As in OpenAI's chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template; nested at most 64 deep."""
    lora: list[Lora] | None = None
    """Adapters that are loaded on the model."""
    cache_prompt: bool | None = None
    """Whether this prompt's KV may be reused and kept; true where absent."""
    cache_salt: str | None = None
    """Keeps a cache apart within the tenant; at most 256 bytes."""
    session_id: str | None = None
    """A hint that keeps a conversation together; at most 256 bytes."""
    priority: int | None = None
    """-1,000 to 1,000; lower is sooner, 0 where absent."""
    timeout_ms: float | None = None
    """Above 0: time from the router's receipt to the terminal; then it ends in `deadline_exceeded`."""
    stream: bool | None = None
    """false: the terminal is the only message and holds the whole text. true where absent."""
    resume_from: ResumeFrom | None = None
    """Goes on behind what was received of an earlier stream."""
    return_token_ids: bool | None = None
    """Asks for `token_ids` in every chunk."""
    return_progress: bool | None = None
    """Asks for `progress` while the prompt is computed."""
    routing: RoutingWish | None = None
    """Wishes about the worker."""


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


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is."""

    running: int = 0
    """Requests that have a lane."""
    waiting: int = 0
    """Accepted requests that wait for one."""
    queued_prefill_tokens: int = 0
    """Prompt tokens that are not computed yet."""
    used_blocks: int = 0
    """Blocks of KV memory that running requests hold."""
    cached_blocks: int = 0
    """Blocks that are kept for requests to come."""
    free_blocks: int = 0
    """Blocks that can be promised."""
    generated_tokens: int = 0
    """Tokens sampled since the engine started."""
    computed_tokens: int = 0
    """Tokens that its steps have computed since it started, of prompts and completions: the work that caches spare."""
    prompt_tokens: int = 0
    """Of the prompts that it has computed since it started."""
    cached_tokens: int = 0
    """Those of them that were cached and did not have to be."""
    step_age_ms: float = 0.0
    """Time since the step in progress began; 0 while idle."""


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """Operating-system process ids of a worker's two processes; `engine` is 0 while there is none."""

    front: int
    """Of the process that speaks NATS."""
    engine: int
    """Of the process that owns the device; 0 while there is none."""


class WorkerState(enum.StrEnum):
    """What a worker can do for a router now."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Its engine died and a new one is being started."""
    DRAINING = "draining"
    STOPPED = "stopped"
    """Its last word: it has withdrawn."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What the router that answers knows of a worker beyond what the worker says of itself."""

    events: Literal["live", "behind", "silent"]
    """`behind`: something was missed, and a snapshot is awaited. `silent`: it computes prompts and never says that it
    holds their blocks, so that only its load counts."""
    indexed_blocks: int
    """Blocks that it is known to hold."""
    lost_events: int
    """Events that never came, in this life of the worker."""
    booked: int
    """Requests that were sent there and that it has not confirmed yet."""


class Card(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's description of itself."""

    worker_id: str
    """Stable name of the worker."""
    epoch: str
    """One life of its front, `<unix ms>-<random>`: new at every start and self-fence."""
    model: str
    """Served name."""
    source: str
    """File or repository of the model."""
    engine: str
    """`gguf`, `onnx` or `sim`."""
    engine_version: str
    """Of the library."""
    context_length: int
    """Tokens of one request, prompt and completion together."""
    max_num_seqs: int
    """Requests that run at the same time."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    hash_scheme: str
    """How blocks are hashed, and the model's fingerprint."""
    features: list[str]
    """What requests may ask for."""
    state: WorkerState
    """What it can do now."""
    host: str
    """Name of the machine."""
    pids: Pids
    """Its processes."""
    versions: dict[str, str]
    """Of the libraries that matter."""
    kv_block_size: int | None = None
    """Tokens of a block; absent where there is no block cache."""
    total_kv_blocks: int | None = None
    """Blocks of its KV memory; likewise."""
    host_kv_blocks: int | None = None
    """Blocks of which it can keep a copy in host memory beside these, and bring it back; likewise."""
    tokenizer_digest: str | None = None
    """Absent: the worker offers no tokenizer bundle; ask it to tokenize."""
    adapters: list[str] = []
    """Adapters that are loaded."""
    role: str = "both"
    """`both`: it computes prompts and completions."""
    load: Load | None = None
    """Only in a `models` reply."""
    watched: Watched | None = None
    """Likewise."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model, and the workers that serve it."""

    model: str
    """Served name."""
    context_length: int
    """The smallest of its workers."""
    features: list[str]
    """What all its workers can do."""
    workers: list[Card] | UnsetType = UNSET
    """Their cards, with load."""


class RefusedCard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that gets no requests, because its card contradicts those of the others."""

    worker_id: str
    """Whose card it is."""
    model: str
    """Which model it says it serves."""
    reason: str
    """What contradicts what."""


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """The router that answers, since it started."""

    router_id: str
    """Its name in logs."""
    decisions: int
    """Placements."""
    decisions_per_s: float
    """Over the last ten seconds or so."""
    decision_p50_us: float
    """Of the time that the last thousand placements took, from token ids to the booking: the median."""
    decision_p99_us: float
    """And what one in a hundred took longer than."""
    waiting: int
    """Requests that wait here because every worker is busy."""
    indexed_blocks: int
    """Blocks in its index, over all models."""
    predicted_hit_rate: float
    """Prompt tokens that were expected to be cached where they were sent, of all."""
    hit_rate: float
    """Prompt tokens that the workers of now have found cached since they started, of all."""
    refused_cards: list[RefusedCard] = []
    """Workers that are not believed."""
    refused_messages: int = 0
    """What workers said that was malformed, out of order, or of nobody known."""


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_request_bytes: int
    """Largest request that the router takes."""


class ModelsReply(Message, frozen=True, kw_only=True):
    """What is being served; `truncated` when the workers had to be left out to fit a message."""

    models: list[ServedModel]
    """Each model that is being served."""
    limits: ServerLimits
    """What clients must keep to."""
    router: RouterView | UnsetType = UNSET
    """Who answers."""
    truncated: bool | UnsetType = UNSET
    """true where the workers did not fit the message."""
