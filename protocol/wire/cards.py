"""The messages that say who serves what: a worker's card, and a router's reply to `models`."""

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.codec import Message
from tokenbus.protocol.wire.params import Range
from tokenbus.protocol.wire.subjects import WorkerAddress


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, tokens and KV blocks of a worker: how busy it is."""

    running: int = 0
    """Requests that have a lane, which is a place in the batch."""
    waiting: int = 0
    """Accepted requests that wait for a lane."""
    queued_prefill_tokens: int = 0
    """Prompt tokens that have not been computed yet."""
    used_blocks: int = 0
    """KV blocks that running requests hold."""
    cached_blocks: int = 0
    """KV blocks that no request holds, kept for later ones."""
    free_blocks: int = 0
    """KV blocks that hold nothing."""
    expected_blocks: int = 0
    """KV blocks that its requests, waiting ones included, use or are expected to use before they end. 0 if unknown."""
    expected_answer_tokens: int = 0
    """Tokens that the next completion is expected to have, judging by recent ones. 0 if unknown."""
    host_blocks: int = 0
    """Copies of KV blocks in host memory. A block may be on the device too."""
    kept_blocks: int = 0
    """KV blocks, or checkpoints, that it keeps longest because clients asked for it."""
    fetched_blocks: int = 0
    """KV blocks that came from other workers since the engine started."""
    generated_tokens: int = 0
    """Tokens sampled since the engine started."""
    computed_tokens: int = 0
    """Prompt and completion tokens that its steps have computed since it started."""
    prompt_tokens: int = 0
    """Tokens of the prompts that it has served since it started."""
    cached_tokens: int = 0
    """The part of these that was cached and did not have to be computed."""
    step_age_ms: float = 0.0
    """Time since the step in progress began; 0 while idle."""
    max_running: int = 0
    """Requests that can have a lane now, if the worker shares KV memory with others; 0: as many as its card says."""
    kv_pool_bytes: int = 0
    """KV memory that it holds now of the memory it shares with others. 0 if it shares none."""


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device of a worker: its memory, and what it computes."""

    name: str
    """The engine's name for it, such as `CUDA0`; `host` for the memory of the machine, within what the worker's
    container may take."""
    kind: str
    """`cpu` or `gpu`."""
    total_bytes: int
    """Its memory."""
    free_bytes: int
    """The part that could be allocated now; memory of cached files counts as free."""
    description: str = ""
    """The driver's description of it, such as a product name."""
    layers: int | None = None
    """The model's layers that it computes; absent where that is not known."""


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and uptime of a worker and of the devices that it uses."""

    devices: list[DeviceHealth]
    """The host first, then the others that its engine computes on."""
    front_bytes: int
    """Resident memory of its frontend."""
    engine_bytes: int
    """Resident memory of its engine's process, which it may share with other workers; 0 while there is none."""
    uptime_s: float
    """Seconds since its frontend started."""
    engine_uptime_s: float
    """Seconds since its engine became ready; 0 while there is none."""


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """Operating-system process ids of a worker's two processes."""

    front: int
    """The frontend, which is connected to NATS."""
    engine: int
    """The engine, which owns the device; 0 while there is none."""


class WorkerState(enum.StrEnum):
    """Whether a worker takes requests, and why not."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Its engine died and a new one is being started."""
    DRAINING = "draining"
    """It takes no new requests and finishes the ones it has."""
    LEAVING = "leaving"
    """Routers are to take its streams elsewhere."""
    STOPPED = "stopped"
    """It has withdrawn; this is its last message."""


class WorkerRole(enum.StrEnum):
    """The share of the work that routers give a worker."""

    BOTH = "both"
    """It computes prompts and completions."""
    PREFILL = "prefill"
    """It computes prompts for others, and gets requests of its own only where no other worker can take them."""
    DECODE = "decode"
    """Its long prompts are computed by workers with the role `prefill`, where any has time."""


class WorkerTracking(msgspec.Struct, frozen=True, kw_only=True):
    """Says how well the answering router can follow a worker."""

    events: Literal["live", "behind", "silent"]
    """`behind`: the router missed events and waits for a snapshot. `silent`: the worker computes prompts and never
    announces their blocks, so that only its load counts."""
    indexed_blocks: int
    """KV blocks that the router knows the worker to hold."""
    lost_events: int
    """Events of the worker's present epoch that never arrived."""
    booked: int
    """Requests that were sent to the worker and that no event has confirmed yet."""
    ejected: bool = False
    """Whether it gets requests only where no other worker can take them, because its last ones have failed."""


class PreviousEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """The epoch that a frontend ended by fencing itself."""

    epoch: str
    """The ended epoch."""
    seq: int
    """The last entry of its event log that may have reached the broker; -1 if none has."""


class CardAdapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that a worker has loaded."""

    name: str
    """The name by which requests refer to it."""
    digest: str
    """Digest of its file: the same name with another digest is another adapter."""
    tenants: list[str] | None = None
    """The tenants that may use it; all of them if absent. Only in cards, not in a `models` reply."""


class CardEmbeddings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The embeddings that a worker makes."""

    dimensions: int
    """The number of dimensions of an embedding."""
    pooling: str
    """The pooling of an input's token states into one: `mean`, `cls`, `last`, or `graph` where an ONNX graph
    does that itself. Workers of one model that pool differently make different embeddings."""
    max_input_tokens: int
    """The maximum number of tokens of one input."""

    def __str__(self) -> str:
        return f"{self.dimensions} numbers, pooled by {self.pooling}, of up to {self.max_input_tokens} tokens"


class Card(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's description of itself."""

    worker_id: str
    """Stable name of the worker."""
    epoch: str
    """Identifies one life of its frontend, `<unix ms>-<random>`: new at every start and after every self-fence."""
    model: str
    """The name under which it is served."""
    source: str
    """The model's file or repository."""
    engine: str
    """`gguf`, `onnx` or `sim`."""
    engine_version: str
    """Version of the engine's library."""
    context_length: int
    """Tokens that one request may have, prompt and completion together."""
    max_num_seqs: int
    """Requests that can run at the same time."""
    max_num_batched_tokens: int
    """Tokens that one step can compute."""
    hash_scheme: str
    """The hash function of its blocks, and the fingerprint of the model."""
    features: list[str]
    """Features that requests may use."""
    state: WorkerState
    """Whether it takes requests."""
    host: str
    """Name of the machine."""
    pids: Pids
    """Ids of its processes."""
    versions: dict[str, str]
    """Versions of the libraries that matter."""
    kv_block_size: int | None = None
    """Tokens in a KV block; absent where there is no prefix cache."""
    total_kv_blocks: int | None = None
    """KV blocks in device memory; absent where there is no prefix cache."""
    host_kv_blocks: int | None = None
    """KV blocks that can be offloaded to host memory beside these; absent where there is no prefix cache."""
    kv_checkpoints: bool = False
    """Prefixes can be reused only up to a block that it lists, and not up to one before."""
    kv_identity: str = ""
    """Workers of the model with equal ones can read each other's KV blocks; absent where the worker exchanges none."""
    kv_token_bytes: int = 0
    """Bytes of a token's keys and values, where it exchanges blocks."""
    tokenizer_digest: str | None = None
    """Digest of its tokenizer bundle; absent where it offers none and has to be asked to tokenize."""
    chat_format_digest: str | None = None
    """Digest of the model's format for reasoning and tool calls, as the worker knows it; absent where it knows none."""
    previous: PreviousEpoch | None = None
    """The epoch before this one, if the same process ended it: its last entries may still be in transit."""
    earlier: list[PreviousEpoch] = []
    """The epochs before `previous` that the same process ended, the latest first; at most 15."""
    adapters: list[CardAdapter] = []
    """The LoRA adapters that are loaded; in a `models` reply, those that the asking tenant may use."""
    embeddings: CardEmbeddings | None = None
    """The embeddings that it makes, with the feature `embed`."""
    role: WorkerRole = WorkerRole.BOTH
    """The share of the work that it gets. `both`: prompts and completions. `prefill`: prompts of others, and
    requests of its own only where no other worker can take them. `decode`: its long prompts are computed by workers of
    the role `prefill`, where any has time."""
    site: str = ""
    """The place where it runs, as its operator names it. Routers prefer workers of their own site, and workers fetch KV
    blocks only from those of theirs; absent where it was given none."""
    process: str = ""
    """Name of the process whose beats speak for it while it is idle; absent where only its own entries do."""
    process_run: str = ""
    """Name of this run of its process, which another start of the process does not have. While it is connected, the
    process hears `worker.<model>.<worker>.alive.<process_run>` over the connection that it publishes on; absent where
    it does not."""
    broker: str = ""
    """Id of the broker that it publishes over."""
    network: str = ""
    """The cluster of that broker, or the broker's own id if it is in none."""
    loadable: bool = False
    """The model is not loaded, or is being unloaded, and a `load` without a `model` loads it. Meanwhile its state is
    `draining`, and it takes no requests. Until first loaded, it has no features, and its numbers are estimates."""
    takes_passed_on: bool = False
    """Deprecated since 0.2.1: routers pass cancels and resyncs of every worker's streams on to its `control`. Still
    true, since those of 0.2.0 do so only then."""
    load: Load | None = None
    """Its load; only in a `models` reply."""
    health: WorkerHealth | None = None
    """Its memory and uptime, at most a few seconds old; only in a `models` reply."""
    watched: WorkerTracking | None = None
    """The answering router's view of it; only in a `models` reply."""

    @property
    def address(self) -> WorkerAddress:
        """The worker whose card this is; a worker's name is unique only within its model."""
        return WorkerAddress(self.model, self.worker_id)

    @property
    def shown_state(self) -> str:
        """Its state as people see it."""
        return "loadable" if self.loadable else self.state


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Workers counted, and the sums of their loads."""

    workers: int
    """The number of workers."""
    states: dict[str, int]
    """The number of workers in each state. One that is not loaded counts as `loadable`, one that was silent for too
    long as `silent`, and one that gets no requests because its last ones have failed as `ejected`."""
    running: int
    """Requests that have a lane."""
    waiting: int
    """Accepted requests that wait for a lane."""
    generated_tokens: int
    """Tokens sampled since the workers' engines started."""


class FleetCounts(WorkerCounts, frozen=True, kw_only=True):
    """The workers of all models, counted."""

    models: int
    """The number of models."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the workers that serve it."""

    model: str
    """The name under which it is served."""
    context_length: int
    """The smallest context length of its workers."""
    features: list[str]
    """Features that all its workers have."""
    loadable: bool | UnsetType = UNSET
    """true if no worker has it loaded, and a request for it makes one load it."""
    adapters: list[str] = []
    """Names of the LoRA adapters that its workers have and the asking tenant may use. `<model>:<adapter>` is a name of
    the model with that adapter."""
    summary: WorkerCounts | UnsetType = UNSET
    """All its workers, counted; absent in a page that continues the model."""
    engines: list[str] | UnsetType = UNSET
    """The engines of its workers, with the summary."""
    engine_bytes: int | UnsetType = UNSET
    """The most resident memory that the engine of a worker takes, with the summary."""
    since_ms: int | UnsetType = UNSET
    """Unix time in ms at which the oldest of its workers started, with the summary."""
    workers: list[Card] | UnsetType = UNSET
    """The workers' cards, with load, or those of the page."""


class RefusedCard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that gets no requests because its card contradicts the others."""

    worker_id: str
    """The worker whose card was refused."""
    model: str
    """The model that it claims to serve."""
    reason: str
    """Which of its values contradict which others."""


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the answering router since it started."""

    router_id: str
    """Its name in logs."""
    site: str = ""
    """The place where it runs, as its operator names it; empty if it was given none."""
    models: list[str] = []
    """The patterns of the names of the models that it serves; none if it serves all."""
    decisions: int
    """Requests that it has placed."""
    decisions_per_s: float
    """Requests placed per second, over about the last ten seconds."""
    decision_p50_us: float
    """Median duration of the last thousand placements, from token ids to the booking."""
    decision_p99_us: float
    """99th percentile of the same."""
    waiting: int
    """Requests that wait in this router because every worker is busy."""
    indexed_blocks: int
    """KV blocks in its prefix index, over all models."""
    predicted_hit_rate: float
    """Share of prompt tokens that were expected to be cached at the chosen worker, or fetched by then."""
    hit_rate: float
    """Share of prompt tokens that the current workers have found cached since they started."""
    refused_cards: list[RefusedCard] = []
    """Workers whose cards were refused."""
    refused_messages: int = 0
    """Messages of workers that were malformed, out of order, or from unknown workers."""
    continued: int = 0
    """Requests that continued elsewhere after their worker was lost or left."""
    passed_on: int = 0
    """Cancels and resyncs of clients that it has passed on to the workers with the streams."""
    predicted_fetch_rate: float = 0.0
    """Share of prompt tokens that were to be fetched from another worker."""
    legs: int = 0
    """Requests whose prompt another worker was to compute."""
    uploads: int = 0
    """Large requests that it is receiving in parts."""
    upload_bytes: int = 0
    """Bytes of these requests received so far."""
    throttled: int = 0
    """Requests refused in the last minute because of a limit of their key or tenant."""
    shares_limits: bool = False
    """Whether limits are shared out evenly, since the bucket by which they hold across routers can't be reached."""
    usage_unsaved_s: float = 0.0
    """Time for which the oldest usage has not been saved."""
    usage_problem: str = ""
    """Why usage can't be saved; empty if it can, or if this router keeps none."""
    audit_queued: int = 0
    """Records that wait to be stored in the audit log."""
    audit_lost: int = 0
    """Records that were lost because too many waited."""


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_request_bytes: int
    """Size of the largest request that the router takes in one message."""
    max_upload_bytes: int | UnsetType = UNSET
    """Size of the largest request that it takes in parts."""


class ModelsRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks what is being served: for everything in one message if no field is given, otherwise for a page."""

    model: str | None = None
    """The only model that is wanted."""
    after: str | None = None
    """The `next` of the page before; absent for the first page."""
    limit: Annotated[int | None, Range(0, limits.MAX_PAGE_WORKERS)] = None
    """The most workers in the page, 256 if absent; with 0 it has models without workers. A page has fewer if more do
    not fit in a message."""


class ModelsReply(Message, frozen=True, kw_only=True):
    """Everything that is being served, or a page of it."""

    models: list[ServedModel]
    """The models that are being served."""
    limits: ServerLimits
    """Limits that clients must keep to."""
    router: RouterStats | UnsetType = UNSET
    """The router that answers."""
    summary: FleetCounts | UnsetType = UNSET
    """The workers of all models, or of the one that was asked for, counted; absent in later pages."""
    truncated: bool | UnsetType = UNSET
    """true if the workers were left out because they did not fit in one message: ask for pages."""
    next: str | UnsetType = UNSET
    """Where the next page begins (`after`), if there is one. Any router can continue."""
    error: errors.Error | UnsetType = UNSET
    """Why there is no page."""
    unserved: list[str] | UnsetType = UNSET
    """Models that were served before and are not now. Requests for these end in `no_worker`, and requests for models
    in neither list in `model_not_found`. Absent if the router started too recently to tell, or there are too many."""

    @property
    def cards(self) -> list[Card]:
        """The cards of the workers of all models."""
        return [card for served in self.models for card in served.workers or []]
