"""What both kinds of cache do: keep the lanes' tokens, and compute new ones behind them."""

from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from tokenbus.worker.engine.onnx.arrays import Array
from tokenbus.worker.engine.onnx.cache.lanes import Copy, Shrink, Transfer
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens


class DecodeResult(NamedTuple):
    """Parts in the order in which they lie in the cache, and their logits, (parts, vocabulary): to put those into
    another order would copy them."""

    parts: list[ScheduledTokens]
    logits: Array


class KvCache(Protocol):
    """The keys and values of all lanes. Runs raise InsufficientMemoryError and DeviceError; one that failed may be
    tried again."""

    def apply(self, changes: Listing[Copy | Transfer | Shrink]) -> None:
        """Carries out what was resolved, in order."""
        ...

    def decode(self, parts: Listing[ScheduledTokens]) -> DecodeResult:
        """Computes parts of one token each."""
        ...

    def prompt(self, part: ScheduledTokens, *, wants_logits: bool) -> Array:
        """The logits behind a part of any length, (1, vocabulary), or (0, vocabulary) where they are not wanted."""
        ...
