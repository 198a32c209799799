"""The boundary to the device: a runner executes the scheduler's step plans and knows nothing of requests."""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from tokenbus.protocol.wire import internal, messages
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.files.device_memory import DeviceMemory

if TYPE_CHECKING:  # a frontend imports this module, and numpy would cost it a tenth of a second
    from tokenbus.worker.engine.device.draws import Matrix
    from tokenbus.worker.engine.device.non_finite import LogitsHealth
    from tokenbus.worker.engine.device.prompt_scores import PromptScores
    from tokenbus.worker.engine.scheduling.lanes import LaneShare


class BatchLimits(NamedTuple):
    """The limits of a pooler's batch."""

    max_tokens: int
    """The most tokens of several inputs; an input with more is computed alone."""
    max_inputs: int
    is_padded: bool
    """Whether each input takes as long as the longest one in the batch."""

    def allow(self, count: int, total: int, longest: int) -> bool:
        """Whether `count` inputs with `total` tokens together may share a batch."""
        num_tokens = count * longest if self.is_padded else total
        return count == 1 or (count <= self.max_inputs and num_tokens <= self.max_tokens)


class PoolingPass(Protocol):
    """The computation of the rows of a batch of inputs."""

    def advance(self, max_tokens: int) -> "Matrix | None":
        """Computes up to `max_tokens` more tokens, or all of them if inputs can't be split. Returns the rows, (inputs,
        width), once they are complete. Raises InsufficientMemoryError and DeviceError."""
        ...


class WholePass:
    """A pass over inputs that can't be split."""

    def __init__(self, pool: "Callable[[Listing[Listing[int]]], Matrix]", inputs: Listing[Listing[int]]) -> None:
        self._pool = pool
        self._inputs = inputs

    def __repr__(self) -> str:
        return f"<WholePass over {len(self._inputs)} inputs>"

    def advance(self, max_tokens: int) -> "Matrix":
        """Computes all rows, ignoring `max_tokens`."""
        return self._pool(self._inputs)


class Pooler(Protocol):
    """Turns each input into one row of numbers."""

    width: int
    """The number of values in a row."""
    max_input_tokens: int
    """The most tokens that one input may have."""
    vocab_size: int
    batch_limits: BatchLimits

    def begin(self, inputs: Listing[Listing[int]]) -> PoolingPass:
        """Starts a pass over inputs, abandoning the previous one. Raises InsufficientMemoryError."""
        ...


class Embedder(Pooler, Protocol):
    """Makes embeddings. `tokenize` may be called from other threads."""

    def describe(self) -> messages.CardEmbeddings:
        """Returns the description of the embeddings in a card."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text, with the special tokens that the model expects around it."""
        ...


class Reranker(Pooler, Protocol):
    """Scores documents: the first number of an input's row is the score. `pair` may be called from other threads."""

    def pair(self, query: str, documents: Listing[str]) -> list[list[int]]:
        """Returns an input for each document: its token ids and those of the query, as the model expects them."""
        ...


class RunnerAdapters(Protocol):
    """The LoRA adapters of a runner, by the digests of their files. `load` may be called from other threads."""

    def __contains__(self, digest: str) -> bool: ...

    def load(self, path: Path) -> str:
        """Loads an adapter while steps continue; returns its digest. Changes nothing if it raises ModelError."""
        ...

    def unload(self, digest: str) -> None:
        """Reverses one `load`. Before the last one is reversed, no sequence may use the adapter."""
        ...


@runtime_checkable
class LaneLender(Protocol):
    """A runner whose lanes can be lent to other replicas, if its configuration has a `kv_lane_bytes`."""

    own_lanes: "LaneShare"
    """The lanes that it may hold if it shares memory with no other replica."""

    def release_lanes(self) -> None:
        """Returns the memory of empty lanes to the system."""
        ...


class Runner(Protocol):
    """Executes steps on one thread. `tokenize`, `encode` and the attributes may be used from other threads."""

    config: contract.EngineConfig
    end_token_ids: frozenset[int]
    token_bytes: list[bytes]
    """The bytes of each token's text, by token id; empty for control tokens."""
    bundle: bytes | None
    canary: Listing[int]
    """Tokens for which its numbers were finite when it was loaded; none if unknown. As few as possible: computing them
    overwrites the memory that they use."""
    reasoning_closer: ReasoningCloser | None
    """None if the reasoning of answers can't be closed."""
    num_lanes: int
    """The number of lanes that running and cached sequences share."""
    row_tiles: RowTiles | None
    """The tiles in which its attention computes many tokens; None if any number takes about as long per token."""

    @property
    def embedder(self) -> Embedder | None:
        """None if the model makes no embeddings."""
        ...

    @property
    def reranker(self) -> Reranker | None:
        """None if the model scores no documents."""
        ...

    @property
    def adapters(self) -> RunnerAdapters | None:
        """None if the engine supports none."""
        ...

    @property
    def logits(self) -> "LogitsHealth | None":
        """Summarizes some of the rows that steps compute; None if they compute none."""
        ...

    @property
    def prompt_scores(self) -> "PromptScores | None":
        """Collects the log probabilities of prompts; None if it can't compute them."""
        ...

    @property
    def copies(self) -> SlotStore | None:
        """Copies of blocks in host memory, to be opened before the first step; None if there can't be any."""
        ...

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        """Prepares sampling for a sequence."""
        ...

    def remove_sequence(self, seq_no: int) -> None:
        """Drops the sampling state of a sequence; does nothing for one that was never added."""
        ...

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Applies KV ops to the lanes, in order. Raises DeviceError."""
        ...

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Computes a plan batch by batch; returns the outcome of each share, in the order of the plan.

        A share is done only if the row after its last token is finite, or, if it is not sampled from, all its keys and
        values are. What a share that is not done has written is overwritten before anything else is computed. Raises
        DeviceError."""
        ...

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Returns the token ids of a text or conversation. Raises RequestError."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a part of an output. Only an engine that supports constraints needs it."""
        ...

    def device_memory(self) -> list[DeviceMemory]:
        """Returns the memory of its devices other than the host. May be called from other threads."""
        ...

    def close(self) -> None:
        """Frees the device's memory."""
        ...
