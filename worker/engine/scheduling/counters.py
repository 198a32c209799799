"""Counts what a scheduler has done since its creation."""

from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.plan import SchedulerCounts


class Counters:
    """The counts of one scheduler, which updates them, and of its pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.restored_tokens = 0
        self.recomputed_tokens = 0
        self.poisoned_shares = 0

    def __repr__(self) -> str:
        return f"<Counters, {self.computed_tokens} tokens computed, {self.generated_tokens} generated>"

    def snapshot(self) -> SchedulerCounts:
        """Returns the counts reported in step stats."""
        cache, checkpoints = self._pool.cache, self._pool.checkpoints
        return SchedulerCounts(
            self.preemptions,
            self.restored_tokens,
            self.recomputed_tokens,
            cache.evicted_blocks,
            cache.host.offloaded_blocks,
            cache.host.onloaded_blocks,
            *((0, 0, 0) if checkpoints is None else (checkpoints.saved, checkpoints.restored, checkpoints.evicted)),
            self.poisoned_shares,
        )
