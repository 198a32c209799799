"""The messages between a frontend and its engine process: length-prefixed MessagePack over a socket (decision 0002).

Each replica has its own socket for commands and reports. The control socket of the process carries only `OpenReplica`,
with the replica's socket attached, `ReplicaClosed` and `ExitReason`.
"""

import enum
import socket
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from tokenbus.protocol.wire import block_hash, errors, internal, messages
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.contract.contract import RecoveredCopies
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.kv.retention import CacheHint
from tokenbus.worker.engine.scheduling.plan import LogitsSummary, ScoredTokens
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.files.device_memory import DeviceMemory

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above the largest real frame, a vocabulary; a larger length means that the stream is corrupt."""
_MAX_DESCRIPTORS_AT_ONCE = 128


class IpcMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages."""


class Add(IpcMessage, frozen=True):
    """Frontend to engine: compute a sequence that fits the KV memory."""

    seq_no: int
    token_ids: bytes
    sampling: engine_request.Sampling
    domain: tuple[str, str] | None = None
    """Tenant and cache salt; None for a sequence that neither uses nor leaves cached blocks."""
    priority: int = 0
    return_progress: bool = False
    num_sampled: int = 0
    """The number of token ids, at the end, that an earlier engine has already sampled."""
    isolated: bool = False
    """Whether an engine died in a step with this sequence, so that it runs alone until it has a new token."""
    constraint: engine_request.Constraint | None = None
    """Compiled before the sequence may start. The `ConstraintCompiled` has the same number."""
    tenant: str = ""
    """Tenants take turns where constraints are compiled."""
    adapters: tuple[block_hash.Adapter, ...] = ()
    """The adapters that it is computed with, all loaded."""
    session: str = ""
    """The tenant's name for the conversation that it belongs to, or empty."""
    cache_ttl_s: float | None = None
    """The time to keep its prefix after it has ended; 0: evicted first."""
    reasoning_limit: engine_request.ReasoningLimit | None = None
    logprobs_from: int | None = None
    """The position of the first token of its prompt whose log probability is wanted; None if none is."""

    @property
    def hint(self) -> CacheHint:
        """The preference for what it leaves in the cache. To have that evicted first, a sequence without a session gets
        its own."""
        session = self.session or ("" if self.cache_ttl_s != 0 else f"\0{self.seq_no}")
        return CacheHint((self.tenant, session) if session else None, self.cache_ttl_s)


class Abort(IpcMessage, frozen=True):
    """Frontend to engine: end a sequence. The engine reports its finish reason."""

    seq_no: int


class TokenizeCall(IpcMessage, frozen=True):
    """Frontend to engine: tokenize a text or conversation. The `TokenizeCallResult` has the same call id."""

    call_id: int
    request: internal.Tokenize


class EmbedCall(IpcMessage, frozen=True):
    """Frontend to engine: compute embeddings. The `PoolResult` has the same call id."""

    call_id: int
    request: internal.Embed


class RerankCall(IpcMessage, frozen=True):
    """Frontend to engine: score documents. The `PoolResult` has the same call id."""

    call_id: int
    request: internal.Rerank


class AbortPooling(IpcMessage, frozen=True):
    """Frontend to engine: drop a call's inputs that are not yet computed. Nothing is reported."""

    call_id: int


class ClearCache(IpcMessage, frozen=True):
    """Frontend to engine: drop every cached block that no sequence uses."""


class RetainSession(IpcMessage, frozen=True):
    """Frontend to engine: keep what a session has left in the cache for `ttl_s`; with 0, evict it first."""

    tenant: str
    session: str
    ttl_s: float


class ExpectTurn(IpcMessage, frozen=True):
    """Frontend to engine: compute the prompt of a turn that is expected, as far as it is known, in steps that would
    otherwise be empty. Nothing is reported."""

    seq_no: int
    turn: engine_request.ExpectedTurn


class LoadAdapter(IpcMessage, frozen=True):
    """Frontend to engine: load an adapter while steps continue. The `AdapterResult` has the same call id."""

    call_id: int
    path: str


class UnloadAdapter(IpcMessage, frozen=True):
    """Frontend to engine: reverse one `LoadAdapter`. Sequences added earlier keep the adapter."""

    digest: str


class ExportBlocks(IpcMessage, frozen=True):
    """Frontend to engine: send the contents of cached blocks. The `ExportedBlocks` has the same call id."""

    call_id: int
    prefix: contract.CachedPrefix
    first: int
    max_blocks: int
    is_last: bool = False


class PutBlocks(IpcMessage, frozen=True):
    """Frontend to engine: cache blocks that another engine has computed."""

    prefix: contract.CachedPrefix
    first: int
    blocks: list[bytes]


class ReadMemory(IpcMessage, frozen=True):
    """Frontend to engine: report the devices' free memory with a `MemoryRead`."""


class OpenReplica(IpcMessage, frozen=True):
    """Frontend to engine process, with a socket attached: run a replica that is served over that socket."""

    number: int
    settings: EngineSettings
    has_memory: bool = False
    """Whether a file for copies of blocks is attached too."""


class LoadBegan(IpcMessage, frozen=True):
    """Engine process to frontend: the files of a replica's model are there, and a library begins to load them."""

    number: int


class ReplicaClosed(IpcMessage, frozen=True):
    """Engine process to frontend: a replica has ended and freed its memory."""

    number: int


class ExitReason(IpcMessage, frozen=True):
    """Engine process to frontend: why the process is about to end."""

    text: str


Command = (
    Add
    | Abort
    | TokenizeCall
    | EmbedCall
    | RerankCall
    | AbortPooling
    | ClearCache
    | RetainSession
    | ExpectTurn
    | LoadAdapter
    | UnloadAdapter
    | ExportBlocks
    | PutBlocks
    | ReadMemory
)


class Loading(IpcMessage, frozen=True):
    """Engine to frontend: how much of the model is loaded, from 0 to 1."""

    fraction: float


class LoadFailed(IpcMessage, frozen=True):
    """Engine to frontend: the model can't be loaded; the message says what to do."""

    message: str
    is_too_large: bool = False
    """Whether it failed for lack of memory."""
    may_pass: bool = False
    """Whether the device failed, so that another start may help, perhaps with less memory."""


class Ready(IpcMessage, frozen=True):
    """Engine to frontend: the model is loaded."""

    config: contract.EngineConfig
    token_bytes: list[bytes]
    bundle: bytes | None
    recovery: RecoveredCopies = RecoveredCopies()
    """The copies found from an earlier engine."""
    stored: list[tuple[int, int]] = []
    """The blocks cached from the start, as in a `StepReport`."""


class StepIsolated(IpcMessage, frozen=True):
    """Engine to frontend: from now on steps contain only this sequence, until it has a token."""

    seq_no: int


class MemoryPoisoned(IpcMessage, frozen=True):
    """Engine to frontend: it ends, because of non-finite numbers that only these sequences may have caused."""

    seq_nos: list[int]


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step for one sequence: tokens, a finish reason, or both."""

    seq_no: int
    token_ids: list[int]
    finish_reason: EngineFinishReason | None
    logprobs: list[engine_output.Logprob] = []
    """One for each token, if they were asked for."""
    cached_tokens: int | None = None
    """With the first tokens, the number of prompt tokens that did not have to be computed."""


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a prompt whose client wants to know it."""

    seq_no: int
    computed_tokens: int
    cached_tokens: int


class StepKind(enum.StrEnum):
    """The kind of work that a step did."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """The stats of a step, for the metrics; counts are since the previous step."""

    kind: StepKind
    seconds: float
    gap_s: float
    """The time since the previous step, if there was work all along; else 0."""
    follower_tokens: int = 0
    """Tokens that followed with certainty from sampled ones."""
    preemptions: int = 0
    restored_tokens: int = 0
    """Tokens that preempted sequences got back from the cache."""
    recomputed_tokens: int = 0
    """Tokens that preempted sequences had to compute again."""
    evicted_blocks: int = 0
    offloaded_bytes: int = 0
    """Keys and values copied to host memory."""
    onloaded_bytes: int = 0
    """Keys and values copied back."""
    saved_checkpoints: int = 0
    restored_checkpoints: int = 0
    evicted_checkpoints: int = 0
    poisoned_shares: int = 0
    """Sequences' parts of steps that were discarded, since their numbers were not finite."""
    checkpoint_bytes: int = 0
    """The host memory that checkpoints take now."""
    logits: LogitsSummary | None = None
    """A row of logits; about one a second is summarized."""
    non_finite_logits: tuple[int, int, int] = (0, 0, 0)
    """The numbers of logits that were NaN, infinity and, in rows with any of these, minus infinity."""
    ahead_tokens: int = 0
    """Tokens of next turns that were computed ahead."""
    used_ahead_tokens: int = 0
    """Those of them that the next turns found."""


class KvPoolStats(msgspec.Struct, frozen=True, array_like=True):
    """A replica's part of the KV memory that the process's replicas share, in bytes."""

    budget: int
    held: int
    share: int
    """The part that it would hold if every replica wanted as much as it can get; anything beyond that is borrowed."""
    cap: int
    """The most that it may ever hold."""
    reclaimed_idle: int
    """The memory of cached prefixes given up for other replicas since the last report."""
    reclaimed_used: int
    """The memory of sequences preempted for other replicas since the last report."""


class ConstraintStarted(IpcMessage, frozen=True):
    """Engine to frontend: the engine process itself starts to compile a sequence's constraint."""

    seq_no: int


class ConstraintCompiled(IpcMessage, frozen=True):
    """Engine to frontend: a sequence's constraint was compiled, or the sequence has ended because it can't be."""

    seq_no: int
    seconds: float
    problem: errors.Error | None = None
    is_too_costly: bool = False
    """Whether the problem is the time or memory that compiling takes."""


class StepReport(IpcMessage, frozen=True):
    """Engine to frontend: the results of a step. `started` lists the sequences that got their first lane."""

    started: list[int]
    outputs: list[SequenceOutput]
    load: messages.Load
    progress: list[PromptProgress] = []
    removed: list[int] = []
    """The hashes of removed blocks."""
    stored: list[tuple[int, int]] = []
    """New cached blocks: the hash of the block before each, and its own."""
    stats: StepStats | None = None
    """None if nothing was computed."""
    kv_pool: KvPoolStats | None = None
    """None if it shares no KV memory."""
    scored: list[ScoredTokens] = []
    """The log probabilities of prompts that the step has computed."""


class TokenizeCallResult(IpcMessage, frozen=True):
    """Engine to frontend: the answer to a `TokenizeCall`; empty with an error."""

    call_id: int
    token_ids: bytes
    error: errors.Error | None


class AdapterResult(IpcMessage, frozen=True):
    """Engine to frontend: the digest of a loaded adapter; empty with an error."""

    call_id: int
    digest: str
    error: errors.Error | None


class ExportedBlocks(IpcMessage, frozen=True):
    """Engine to frontend: the answer to an `ExportBlocks`. `num_cached` blocks of the prefix are cached."""

    call_id: int
    num_cached: int
    blocks: list[bytes]


class BlocksRefused(IpcMessage, frozen=True):
    """Engine to frontend: blocks from another worker were not cached, since one of them can't be used."""

    num_blocks: int


class MemoryRead(IpcMessage, frozen=True):
    """Engine to frontend: the memory of its devices besides the host."""

    devices: list[DeviceMemory]


class PoolingBatch(IpcMessage, frozen=True):
    """Engine to frontend: from now on inputs of these calls are computed, and no step; without calls, steps resume."""

    call_ids: list[int]


class PoolResult(IpcMessage, frozen=True):
    """Engine to frontend: the answer to an `EmbedCall` or `RerankCall`; empty with an error."""

    call_id: int
    rows: bytes
    """32-bit little-endian floats."""
    prompt_tokens: int
    error: errors.Error | None


Report = (
    Loading
    | LoadFailed
    | Ready
    | StepIsolated
    | MemoryPoisoned
    | ConstraintStarted
    | ConstraintCompiled
    | StepReport
    | TokenizeCallResult
    | AdapterResult
    | ExportedBlocks
    | BlocksRefused
    | MemoryRead
    | PoolingBatch
    | PoolResult
)

_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
open_decoder: msgspec.msgpack.Decoder[OpenReplica] = msgspec.msgpack.Decoder(OpenReplica)
process_message_decoder: msgspec.msgpack.Decoder[LoadBegan | ReplicaClosed | ExitReason] = msgspec.msgpack.Decoder(
    LoadBegan | ReplicaClosed | ExitReason
)


def encode(frame: Command | Report | OpenReplica | LoadBegan | ReplicaClosed | ExitReason) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a stream of bytes into the bodies of frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies that are now complete. Raises ValueError if the stream is corrupt."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def receive(sock: socket.socket) -> Iterator[bytes]:
    """Yields the bodies of frames from a blocking socket until its other end closes."""
    decoder = FrameDecoder()
    while True:
        try:
            data = sock.recv(1 << 16)
        except OSError:  # closed at either end
            return
        if not data:
            return
        yield from decoder.feed(data)


def receive_with_sockets(sock: socket.socket) -> Iterator[tuple[OpenReplica, socket.socket, int | None]]:
    """Yields messages with the socket and file attached to each, from a blocking socket until its other end closes."""
    decoder = FrameDecoder()
    received: deque[int] = deque()
    while True:
        # Descriptors arrive with the first byte of their message, which may come in pieces; order is preserved.
        data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, _MAX_DESCRIPTORS_AT_ONCE)
        if not data:
            return
        received += descriptors
        for body in decoder.feed(data):
            opened = open_decoder.decode(body)
            theirs = socket.socket(fileno=received.popleft())
            yield opened, theirs, received.popleft() if opened.has_memory else None
