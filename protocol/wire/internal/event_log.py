"""The event log of a worker, and the snapshot of what it holds."""

from typing import Annotated

import msgspec

from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.params import Range


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Announces a request that the worker has accepted."""

    id: str
    """`<tenant token>:<id>`."""
    stream_no: int
    """Number of the stream, unique in this epoch, by which entries name it."""
    attempt: int
    """The attempt that was accepted."""
    prompt_tokens: int
    """Tokens of the prompt."""
    router_id: str = ""
    """The router that has placed it and is its guardian."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tells how long a stream took to reach its first token, and what its first worker decided."""

    stream_no: int
    """Number of the stream."""
    cached_tokens: int
    """Prompt tokens that were cached."""
    queue_ms: float
    """Time from the accept to the first step."""
    prefill_ms: float
    """Time from the first step to the first token."""
    max_tokens: int | None = None
    """Tokens that the stream may have: as many as its request asks for, or fewer if the worker's limits allow fewer."""


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says how a request has ended, as its terminal does. Workers of earlier versions send none."""

    id: str
    """`<tenant token>:<id>`."""
    router_id: str = ""
    """The guardian that the log has named last, which is the one to count it."""
    finish_reason: public.FinishReason
    """The finish reason of the terminal."""
    code: str = ""
    """The code of the error; empty if there is none."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as in the terminal."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` that did not have to be computed."""
    completion_tokens: int = 0
    """Tokens of the completion, as in the terminal."""
    queue_ms: float = 0.0
    """The same as in the terminal's `timings`, like the next three."""
    prefill_ms: float = 0.0
    fetched_tokens: int = 0
    fetch_ms: float = 0.0
    gaps: list[int] = []
    """Times between tokens here: how many took less than 1 ms, 2, 4, 8 and so on; the 14th counts all from 4,096 ms."""
    answer: public.ChatMessage | None = None
    """The answer as a message, if the run wants it and the model has reasoned: the next turn's prompt may lack that."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reports the end of the fetch that a run asked for; not sent if the stream ended first."""

    stream_no: int
    """Number of the stream."""
    worker_id: str
    """The worker from which blocks were fetched."""
    fetched_tokens: int = 0
    """Tokens of the blocks that arrived and were accepted; 0 if none were, for any reason."""
    fetched_bytes: int = 0
    """Bytes of these blocks."""
    fetch_ms: float = 0.0
    """Time from the accept to the end of the fetch."""
    was_leg: bool = False
    """Whether the source had to compute the blocks first, so that the time does not show how fast they move."""


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one hash chain."""

    parent: int
    """Hash of the block before the first one."""
    hashes: list[int]
    """Hashes of the blocks, in their order."""


class Events(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a worker's numbered event log. An empty one is a heartbeat."""

    worker_id: str
    """The worker whose log it is."""
    epoch: str
    """The worker's epoch."""
    seq: int
    """Number of the entry, from 1 in each epoch, without gaps."""
    load: public.Load
    """Load after this event."""
    state: public.WorkerState
    """State after this event."""
    health: public.WorkerHealth | None = None
    """Memory and uptime, in one entry every five seconds."""
    cleared: bool = False
    """Whether all earlier blocks are gone, because a new engine has started."""
    removed: list[int] = []
    """Hashes of blocks that are gone."""
    stored: list[BlockRun] = []
    """Blocks that are new."""
    started: list[Started] = []
    """Requests that the worker has accepted."""
    stream_nos: bytes = b""
    """The stream of each of `token_ids`, as unsigned 32-bit little-endian integers."""
    token_ids: bytes = b""
    """Sampled tokens that clients are about to get, in the order of sampling; unsigned 32-bit little-endian."""
    logprobs: dict[int, bytes] = {}
    """Log probabilities of these tokens by stream number, for requests that ask for them. Only workers read them."""
    first_tokens: list[FirstToken] = []
    """Streams whose first token is among `token_ids`."""
    fetches: list[Fetched] = []
    """Fetches of blocks that have ended."""
    legs: list[str] = []
    """Keys of requests of other workers whose prompts this worker has begun to compute."""
    finished: list[str] = []
    """Keys of requests that have ended, sent after their terminal."""
    ends: list[StreamEnd] = []
    """The ends of those of `finished` that were given a terminal."""
    failed: list[str] = []
    """Keys of those that ended in an error that another worker may not have."""
    taken: list[str] = []
    """Keys of requests that a router has taken from here, to continue them elsewhere."""
    stranded: list[str] = []
    """Keys of requests that this worker can't continue because its engine lacks an adapter that was unloaded. Their
    guardians take them, as from a worker that leaves. Repeated once a second until that has happened."""
    guardians: dict[int, str] = {}
    """The new guardians of streams, by stream number; only the router that was named last acts on a stream."""


class Seal(public.Message, frozen=True, kw_only=True):
    """Says that the chunks with the tokens of an entry have reached the broker."""

    epoch: str
    """The worker's epoch."""
    seq: int
    """Number of the entry."""


class Beat(public.Message, frozen=True, kw_only=True):
    """Speaks for the idle workers of one process."""

    epoch: str
    """The epoch of all of them."""
    next_ms: Annotated[float, Range(0, 1e3 * limits.MAX_BEAT_S)]
    """Time within which they are heard of again, in a beat or in entries of their own."""
    seqs: dict[str, int]
    """The last entry of each worker's event log, by the worker's name: it has published nothing since."""


class SnapshotRequest(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks what a worker holds. An empty message asks for no tokens."""

    known_tokens: dict[str, int] = {}
    """Requests whose sampled tokens are wanted, each with the number of tokens that are known."""
    wants_others: bool = False
    """Whether the tokens of all other requests are wanted too: all that their current attempt has sampled."""
    follows_beats: bool = False
    """Deprecated since 0.2.1: every router takes beats as signs of life. Still true, since workers of 0.2.0 send none
    otherwise."""


class StreamState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream so far, for a router that may know some of its tokens.

    A worker that continues it gets all of them (`RunResume`), and a client gives those that it has (`ResumeFrom`). Both
    have other fields in version 1 of the wire."""

    num_tokens: int = 0
    """The number of its sampled tokens."""
    token_ids: bytes = b""
    """Its tokens that the router does not know, if they are wanted, as unsigned 32-bit little-endian integers."""
    logprobs: bytes = b""
    """The log probabilities of `token_ids`, if the request asks for them, in a form that only workers read."""
    first_token: FirstToken | None = None
    """The report of its first token, once this worker has sampled one."""


class RunningRequest(StreamState, frozen=True, kw_only=True, omit_defaults=True):
    """A request in a worker's snapshot."""

    id: str
    """`<tenant token>:<id>`."""
    attempt: int
    """The attempt that is running."""
    stream_no: int
    """Number of the stream."""
    router_id: str = ""
    """Its guardian."""


class SnapshotPart(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a snapshot: everything that a worker held after event `seq`."""

    worker_id: str
    """The worker that answers."""
    epoch: str
    """The worker's epoch."""
    seq: int
    """The last event before the snapshot."""
    part: int
    """Number of this part, from 0."""
    parts: int
    """Number of all parts."""
    runs: list[BlockRun]
    """Blocks that the worker holds."""
    running: list[RunningRequest]
    """Requests that the worker holds."""
    load: public.Load
    """Load of the worker."""
    ends: list[StreamEnd] = []
    """The ends of those of the request's `known_tokens` that ended in the last minute."""
