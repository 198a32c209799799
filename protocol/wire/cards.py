"""The messages that say who serves what: a worker's card, and what a router answers to `models`."""

import enum
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire.message import Message
from tokenbus.protocol.wire.subjects import WorkerAddress


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


class WorkerTracking(msgspec.Struct, frozen=True, kw_only=True):
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
    """One life of its frontend, `<unix ms>-<random>`: new at every start and self-fence."""
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
    watched: WorkerTracking | None = None
    """Likewise."""

    @property
    def address(self) -> WorkerAddress:
        """Whose card it is: a name is a worker's only within its model."""
        return WorkerAddress(self.model, self.worker_id)


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


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
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
    router: RouterStats | UnsetType = UNSET
    """Who answers."""
    truncated: bool | UnsetType = UNSET
    """true where the workers did not fit the message."""
    unserved: list[str] | UnsetType = UNSET
    """Models that were served and are not now: requests for these end in `no_worker`, and for any that is neither here
    nor in `models` in `model_not_found`. Absent where the router is too young to tell, or they are too many."""
