"""The messages by which a fleet is seen as it changes: by `tokenbus top`, and by consoles."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.cards import RouterStats
from tokenbus.protocol.wire.codec import Message
from tokenbus.protocol.wire.rate_limits import RateLimits

FLEET_DIGEST_S = 1.0
"""Time between two digests."""
FLEET_VIEW_S = 5.0
"""Time for which a router sends digests after it was asked."""
MAX_FLEET_VIEWS = 64
"""Reply subjects to which a router sends digests at a time."""


class FleetRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks to see the fleet. Without `router_id`, each router answers once, without workers."""

    router_id: Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME_BYTES)] | None = None
    """The router that is to send digests to the reply subject for the next 5 s. Ask again before that to see more; as
    long as nobody asks, none are made."""
    whole: bool = False
    """Whether the next digest must name all workers, because one was missed."""


class WorkerSheet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, by all that hardly ever changes."""

    number: int
    """Stands for it in digests of this router's life."""
    worker_id: str
    """Its name."""
    model: str
    """The model that it serves."""
    engine: str
    """`gguf`, `onnx` or `sim`."""
    host: str
    """Name of the machine."""
    max_num_seqs: int
    """Requests that can run at the same time."""
    role: str = "both"
    """The same as in its card."""
    site: str = ""
    """The same as in its card."""
    since_ms: int = 0
    """Unix time in ms at which its frontend started, or last fenced itself."""
    kv_block_bytes: int = 0
    """Bytes of a KV block; 0 if it does not say."""


class WorkerNumbers(msgspec.Struct, frozen=True, array_like=True):
    """All that changes of a worker, as an array."""

    number: int
    """The worker, by its sheet."""
    state: str
    """Its state as people see it: that of its card, or `loadable`, `silent` or `ejected`. For ten minutes after it was
    lost it is `lost`, or `loading` once a process of its name is there again, until that is ready."""
    running: int = 0
    """Requests that have a lane."""
    max_running: int = 0
    """Requests that can run now."""
    waiting: int = 0
    """Accepted requests that wait for a lane."""
    booked: int = 0
    """Requests that the router has sent to it and no event has confirmed yet."""
    queued_prefill_tokens: int = 0
    """Prompt tokens that have not been computed yet."""
    tokens_per_s: float = 0.0
    """Tokens sampled a second, since the digest before."""
    token_ms: float = 0.0
    """Milliseconds from one token of a stream to the next at its best; 0 while unknown."""
    step_age_ms: float = 0.0
    """Time since the step in progress began; 0 while idle."""
    hit_rate: float = 0.0
    """Share of prompt tokens that were cached, since its engine started."""
    used_blocks: int = 0
    """KV blocks that running requests hold."""
    cached_blocks: int = 0
    """KV blocks that no request holds, kept for later ones."""
    total_blocks: int = 0
    """All its KV blocks."""
    expected_blocks: int = 0
    """KV blocks that its requests use or are expected to use before they end."""
    host_blocks: int = 0
    """Copies of KV blocks in host memory."""
    kept_blocks: int = 0
    """KV blocks, or checkpoints, that it keeps longest because clients asked for it."""
    fetched_blocks: int = 0
    """KV blocks that came from other workers since the engine started."""
    indexed_blocks: int = 0
    """KV blocks that the router knows it to hold."""
    events: str = ""
    """`live`, `behind` or `silent`: whether the router can follow its events, as in a `models` reply."""
    lost_events: int = 0
    """Events that never arrived."""
    kv_pool_bytes: int = 0
    """KV memory that it holds now of the memory it shares with others."""


class WorkerMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a worker takes and leaves, as an array, in MiB so that it is seldom sent."""

    number: int
    """The worker, by its sheet."""
    front_mib: int
    """Resident memory of its frontend."""
    engine_mib: int
    """Resident memory of its engine's process, which it may share with other workers."""
    engine_since_s: int
    """Seconds from its frontend's start until its engine was ready."""
    devices: list[tuple[str, int, int]]
    """Its devices, the host first: name, MiB in all, MiB free."""


class ModelQueue(msgspec.Struct, frozen=True, array_like=True):
    """Requests of a model that this router holds, as an array."""

    model: str
    """The model."""
    waiting: int
    """Those that wait because every worker is busy."""
    held: int
    """Those that wait for the model to be loaded, or for a worker of it."""
    progress: float | None = None
    """The share of the model that is loaded, if it is being loaded for them."""


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a tenant or of an API key, as one router sees them."""

    tenant: str
    """The tenant."""
    key_id: str = ""
    """The key's id; empty for the limits of the tenant."""
    rate_limits: RateLimits | UnsetType = UNSET
    """The requests and tokens left, if these are limited."""
    open: int = 0
    """Its open requests at this router, if these are limited."""
    max_open: int = 0
    """The limit of open requests at all routers; 0: none."""
    refused: int = 0
    """Requests that this router has refused in the last minute because of these limits."""


class FleetDigest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Tells what has changed in a router's fleet since the digest before, or everything."""

    router_id: str = ""
    """The router that sends it."""
    router: RouterStats | UnsetType = UNSET
    """That router's state; in the first part of each digest."""
    life: str = ""
    """Names one life of the router: numbers of workers hold as long as it stays the same."""
    seq: int = 0
    """The number of the digest. If one is missing, ask for a whole one."""
    part: int = 0
    """The number of this part, from 0."""
    parts: int = 0
    """The number of parts of the digest; 0 in the answer to a request without `router_id`."""
    whole: bool = False
    """Whether it has all workers, and those it does not name are gone."""
    joined: list[WorkerSheet] = []
    """Workers that are new, or that have changed in what hardly ever changes."""
    workers: list[WorkerNumbers] = []
    """Workers of which something has changed."""
    memory: list[WorkerMemory] = []
    """Workers whose memory has changed."""
    left: list[int] = []
    """Numbers of workers that are gone."""
    queues: list[ModelQueue] = []
    """Models of which requests wait here; the others have none. In the first part of each digest."""
    limits: list[ClientLimits] = []
    """In the answer to a request without `router_id`: the limits of the asking key and of its tenant. Operators see
    those of which this router has refused most in the last minute."""
    error: errors.Error | UnsetType = UNSET
    """Why no digest comes."""
