"""The boundary to the device: a runner executes the plans of the scheduler and knows nothing of requests."""

from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING, Protocol

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.scheduling.plan import SampledToken, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason

if TYPE_CHECKING:  # of numpy nothing is needed here that a frontend would wait a tenth of a second for
    from tokenbus.worker.engine.sampler import Matrix


class InsufficientMemoryError(RuntimeError):
    """The KV memory could not take the step; it is as it was before."""


class DeviceError(RuntimeError):
    """The device failed: nothing that it holds can be trusted any more."""


class ModelError(RuntimeError):
    """The model can't be loaded; says what to do. Loading it again won't help."""


class Embedder(Protocol):
    """Makes vectors of token ids. `tokenize` may be used from other threads."""

    width: int
    """Numbers of a vector."""
    max_input_tokens: int
    """Tokens that one input may have."""
    vocab_size: int

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, with what the model wants around it."""
        ...

    def embed(self, inputs: Listing[Listing[int]]) -> "Matrix":
        """A row for each input. Raises InsufficientMemoryError and DeviceError."""
        ...


class Runner(Protocol):
    """Executes steps on one thread. `tokenize` and the descriptive members may be used from other threads."""

    config: contract.EngineConfig
    end_token_ids: frozenset[int]
    token_bytes: list[bytes]
    """The bytes of each token's text, by token id; empty for control tokens."""
    bundle: bytes | None
    embedder: Embedder | None
    """Makes embeddings, where the model can."""
    num_lanes: int
    """Lanes that running and cached sequences share."""

    def add_sequence(self, seq_no: int, sampling: contract.Sampling) -> None:
        """Prepares to sample for a sequence."""
        ...

    def remove_sequence(self, seq_no: int) -> None:
        """Lets go of what was prepared for a sequence; does nothing for one that never began."""
        ...

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Has lanes share, give up, save and restore tokens, in order. Raises DeviceError."""
        ...

    def step(self, plan: StepPlan) -> list[SampledToken | EngineFinishReason]:
        """Computes every part; a token, or `EngineFinishReason.BAD_LOGITS`, for each that samples.

        Raises InsufficientMemoryError, after which the plan may be tried without one of its sequences, and
        DeviceError."""
        ...

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Raises RequestError."""
        ...

    def close(self) -> None:
        """Gives back the device's memory."""
        ...
