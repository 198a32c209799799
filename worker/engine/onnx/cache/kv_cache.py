"""The interface of both kinds of cache: they keep the tokens of all lanes, and compute new ones after them."""

from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from tokenbus.worker.engine.onnx.cache.lanes import LaneChange
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.session import NO_ADAPTERS, AdapterInputs
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens


class DecodeGroup(NamedTuple):
    """Parts of one token each, of sequences that have the same adapters."""

    parts: Listing[ScheduledTokens]
    adapters: AdapterInputs = NO_ADAPTERS


class DecodeResult(NamedTuple):
    """The parts in the order of the cache's rows, and their logits, of (parts, vocabulary).

    Reordering the logits would copy them."""

    parts: list[ScheduledTokens]
    logits: Array


class KvCache(Protocol):
    """The keys and values of all lanes. `decode` and `prompt` raise InsufficientMemoryError, after which they can be
    retried, and DeviceError."""

    @property
    def held_tokens(self) -> int:
        """The tokens for which rows take memory, including copies and padding."""
        ...

    def apply(self, changes: Listing[LaneChange]) -> None:
        """Carries out changes in order."""
        ...

    def erase(self, lane: int, end: int) -> None:
        """Leaves a lane its first `end` tokens, and overwrites everything after them: a run that reads that multiplies
        it by 0, and 0 x NaN is NaN. The lane may hold more tokens than its recorded length."""
        ...

    def save(self, lane: int, start: int, end: int) -> bytes:
        """Returns the tokens `start` to `end` of a lane: for each tensor (heads, tokens, width), one after another."""
        ...

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        """Appends the tokens `start` to `end` to a lane that holds `start`. The data may hold more after them. Raises
        InsufficientMemoryError."""
        ...

    def decode(self, groups: Listing[DecodeGroup]) -> list[DecodeResult]:
        """Computes groups, each in its own runs."""
        ...

    def prompt(self, part: ScheduledTokens, *, wants_logits: bool, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
        """Computes a part of any length. Returns its last logits, of (1, vocabulary), or (0, vocabulary)."""
        ...

    def release_lanes(self) -> bool:
        """Frees the memory of lanes that hold no token. Returns whether the heap may keep some of it."""
        ...

    def drop_bindings(self) -> None:
        """Drops all bindings, which keep alive adapters' matrices and their session."""
        ...
