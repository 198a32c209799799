"""Counts what a scheduler has done since its creation."""

import dataclasses
from typing import NamedTuple

from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.next_turns import TurnsAhead


class SchedulerCounts(NamedTuple):
    """A scheduler's counts since its creation."""

    preemptions: int = 0
    restored_tokens: int = 0
    """Tokens that preempted sequences regained from the cache."""
    recomputed_tokens: int = 0
    """Tokens that preempted sequences had to compute again."""
    evicted_blocks: int = 0
    """Cached blocks that had to leave the device."""
    offloaded_blocks: int = 0
    onloaded_blocks: int = 0
    saved_checkpoints: int = 0
    restored_checkpoints: int = 0
    """The number of times a sequence continued from a checkpoint."""
    evicted_checkpoints: int = 0
    poisoned_shares: int = 0
    """Shares of steps that were discarded because the model computed non-finite numbers."""
    ahead_tokens: int = 0
    """Tokens of next turns that were computed ahead."""
    used_ahead_tokens: int = 0
    """Those of them that the next turns found."""


@dataclasses.dataclass(slots=True)
class Counters:
    """The counts that a scheduler keeps itself."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    poisoned_shares: int = 0

    def snapshot(self, pool: BlockPool, next_turns: TurnsAhead) -> SchedulerCounts:
        """Returns the counts reported in step stats."""
        cache, checkpoints = pool.cache, pool.checkpoints
        return SchedulerCounts(
            self.preemptions,
            self.restored_tokens,
            self.recomputed_tokens,
            cache.evicted_blocks,
            cache.host.offloaded_blocks,
            cache.host.onloaded_blocks,
            *((0, 0, 0) if checkpoints is None else (checkpoints.saved, checkpoints.restored, checkpoints.evicted)),
            self.poisoned_shares,
            next_turns.computed_tokens,
            next_turns.used_tokens,
        )
