"""The internal messages between routers and workers; always MessagePack."""

from typing import Any, Literal

import msgspec

from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as public


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asked of its completion; None means the model's own default, which only the worker knows."""

    max_tokens: int | None = None
    """As in the request."""
    min_tokens: int = 0
    """As in the request."""
    temperature: float | None = None
    """As in the request."""
    top_p: float | None = None
    """As in the request."""
    top_k: int | None = None
    """As in the request."""
    min_p: float | None = None
    """As in the request."""
    seed: int | None = None
    """As in the request."""
    repetition_penalty: float | None = None
    """As in the request."""
    repetition_last_n: int | None = None
    """As in the request."""
    presence_penalty: float = 0.0
    """As in the request."""
    frequency_penalty: float = 0.0
    """As in the request."""
    logit_bias: dict[int, float] = {}
    """As in the request, the token ids always numbers."""
    logprobs: int | None = None
    """As in the request."""
    stop: list[str] = []
    """As in the request, always a list."""
    stop_token_ids: list[int] = []
    """As in the request."""
    ignore_eos: bool = False
    """As in the request."""
    stream: bool = True
    """As in the request."""
    return_token_ids: bool = False
    """As in the request."""
    return_progress: bool = False
    """As in the request."""
    cache_prompt: bool = True
    """As in the request."""
    cache_salt: str = ""
    """As in the request."""
    session_id: str | None = None
    """As in the request."""
    priority: int = 0
    """As in the request."""


class RunResume(msgspec.Struct, frozen=True, kw_only=True):
    """Where a handed-over or resumed generation goes on."""

    completion_token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    text_offset: int
    """UTF-8 bytes of text that the client holds."""
    sampler: bytes | None = None
    """State of the sampler."""


class Run(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A placed request, from a router to one worker."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: int
    """One higher at every dispatch."""
    epoch: str
    """The life of the worker that is meant: any other refuses."""
    router_id: str
    """Who sends it."""
    reply: str
    """The client's inbox: chunks go there."""
    encoding: codec.Encoding
    """How chunks are encoded: `json` or `msgpack`."""
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    params: GenerationParams
    """How to generate."""
    remaining_ms: float | None = None
    """Of the request's time."""
    age_ms: float | None = None
    """Since the router received the request: a cancel that came before that was not meant for it."""
    crashes: int = 0
    """Engines that died in a step holding this request."""
    resume_from: RunResume | None = None
    """Where an earlier stream is to go on."""
    routing: public.RoutingReport | None = None
    """For the terminal, when the client asked why."""


class RunReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    accepted: bool
    """The terminal is the worker's from now on."""
    error: errors.Error | None = None
    """Why it was refused."""
    same_reply: bool = False
    """Refused because the id is in flight, by a stream that speaks to the very same inbox: say nothing there."""
    cancelled: bool = False
    """Refused because its cancel was here first."""


class Control(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    op: Literal["drop", "drain", "clear_cache", "load", "unload"]
    """What to do."""
    request_id: str | None = None
    """With `drop`: which request."""
    attempt: int | None = None
    """With `drop`: that attempt, and all before."""
    model: str | None = None
    """With `load`: a file, a directory or a name on the Hub, as the worker finds it."""
    served_name: str | None = None
    """With `load`: the model's name on the wire; the file's name where absent."""
    replicas: int = 1
    """With `load`: how many replicas of it."""
    settings: dict[str, Any] = {}
    """With `load`: engine settings by name, where they shall differ from the worker's own."""


class ControlReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    ok: bool
    """It was done. For `drop` false means that the attempt has spoken and goes on."""
    error: errors.Error | None = None
    """What was wrong with the message, or why it could not be carried out."""
    progress: float | None = None
    """Of `load`: the share that is done. Replies follow until it is 1, or `ok` is false."""
    worker_ids: list[str] = []
    """Of `load`, when it is done: the new replicas."""


class Tokenize(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker to make token ids of a text, or of a conversation by its template."""

    text: str | None = None
    """A text, in which nothing is a special token."""
    messages: list[public.ChatMessage] | None = None
    """Or a conversation."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for its template."""


class TokenizeReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    token_ids: bytes | None = None
    """Unsigned 32-bit little-endian integers."""
    error: errors.Error | None = None
    """Instead."""


class Embed(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for embeddings. It may be asked again, or another: the answer is the same."""

    inputs: list[str | list[int]]
    """Texts, or lists of token ids."""
    dimensions: int | None = None
    """Length of the vectors; all that the model makes where absent."""
    normalize: bool = True
    """To unit length."""
    remaining_ms: float
    """Of the request's time."""


class EmbedResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    vectors: bytes = b""
    """A row for each input: 32-bit little-endian floating-point numbers."""
    prompt_tokens: int = 0
    """Of all inputs."""
    error: errors.Error | None = None
    """Instead."""


class TokenizerPart(public.Message, frozen=True, kw_only=True):
    """One of the parts that together are a `TokenizerBundle`."""

    digest: str
    """Of the whole bundle, as in the card."""
    part: int
    """From 0."""
    parts: int
    """How many there are."""
    data: bytes
    """Bytes of the bundle."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the worker has accepted."""

    id: str
    """`<tenant token>:<id>`."""
    prompt_tokens: int
    """Tokens of its prompt."""
    overlap_blocks: int
    """Leading blocks that were there already."""


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one chain, and the block before the first."""

    parent: int
    """Hash of the block before the first."""
    hashes: list[int]
    """Hashes in order."""


class Events(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a worker's numbered event log; an empty one is its heartbeat."""

    worker_id: str
    """Whose log it is."""
    epoch: str
    """Which life's."""
    seq: int
    """From 0 in each epoch, without gaps."""
    load: public.Load
    """After this event."""
    state: public.WorkerState
    """After this event."""
    cleared: bool = False
    """Nothing that an earlier engine held is left."""
    removed: list[int] = []
    """Hashes of blocks that are gone."""
    stored: list[BlockRun] = []
    """Blocks that are new."""
    started: list[Started] = []
    """Requests that were accepted."""
    first_token_sent: list[str] = []
    """Requests whose client is about to get text."""
    finished: list[str] = []
    """Requests that have ended, in whatever way, behind their terminal."""


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """`<tenant token>:<id>`."""
    attempt: int
    """Which attempt runs."""
    first_token_sent: bool
    """Its client has got text."""


class SnapshotPart(public.Message, frozen=True, kw_only=True):
    """One of the parts that together say what a worker held after event `seq`."""

    worker_id: str
    """Who answers."""
    epoch: str
    """In which life."""
    seq: int
    """The last event before the snapshot."""
    part: int
    """From 0."""
    parts: int
    """How many there are."""
    runs: list[BlockRun]
    """Blocks that it holds."""
    running: list[RunningRequest]
    """Requests that it holds."""
    load: public.Load
    """How busy it is."""
