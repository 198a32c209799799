"""The internal messages between routers and workers; always MessagePack."""

from typing import Any, Literal

import msgspec

from protocol import codec, errors
from protocol import messages as public


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asked of its completion; None means the model's own default, which only the worker knows."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = True
    return_token_ids: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    session_id: str | None = None
    priority: int = 0


class RunResume(msgspec.Struct, frozen=True, kw_only=True):
    """Where a handed-over or resumed generation goes on."""

    completion_token_ids: bytes
    text_offset: int
    sampler: bytes | None = None


class Run(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A placed request, from a router to one worker."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: int
    epoch: str
    router_id: str
    reply: str
    """The client's inbox: chunks go there."""
    encoding: codec.Encoding
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    params: Params
    remaining_ms: float | None = None
    age_ms: float | None = None
    """Since the router received the request: a cancel that came before that was not meant for it."""
    crashes: int = 0
    resume_from: RunResume | None = None
    routing: public.RoutingReport | None = None
    """For the terminal, when the client asked why."""


class RunReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    accepted: bool
    error: errors.Error | None = None
    same_reply: bool = False
    """Refused because the id is in flight, by a stream that speaks to the very same inbox: say nothing there."""
    cancelled: bool = False
    """Refused because its cancel was here first."""


class Control(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    op: Literal["drop", "drain", "clear_cache", "load", "unload"]
    request_id: str | None = None
    attempt: int | None = None


class ControlReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    ok: bool
    error: errors.Error | None = None


class Tokenize(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker to make token ids of a text, or of a conversation by its template."""

    text: str | None = None
    messages: list[public.ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    token_ids: bytes | None = None
    error: errors.Error | None = None


class TokenizerPart(public.Message, frozen=True, kw_only=True):
    """One of the parts that together are a `TokenizerBundle`."""

    digest: str
    part: int
    parts: int
    data: bytes


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the worker has accepted."""

    id: str
    prompt_tokens: int
    overlap_blocks: int


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one chain, and the block before the first."""

    parent: int
    hashes: list[int]


class Events(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a worker's numbered event log; an empty one is its heartbeat."""

    worker_id: str
    epoch: str
    seq: int
    load: public.Load
    state: public.WorkerState
    cleared: bool = False
    removed: list[int] = []
    stored: list[BlockRun] = []
    started: list[Started] = []
    spoken: list[str] = []
    finished: list[str] = []


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    attempt: int
    spoken: bool


class SnapshotPart(public.Message, frozen=True, kw_only=True):
    """One of the parts that together say what a worker held after event `seq`."""

    worker_id: str
    epoch: str
    seq: int
    part: int
    parts: int
    runs: list[BlockRun]
    running: list[RunningRequest]
    load: public.Load
