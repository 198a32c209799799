"""The step timer makes the stats of each step, which the frontend turns into metrics."""

from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.process.ipc import KvPoolStats, StepKind, StepStats
from tokenbus.worker.engine.scheduling.counters import SchedulerCounts
from tokenbus.worker.engine.scheduling.lanes import BorrowedLanes
from tokenbus.worker.engine.scheduling.plan import SeenLogits, StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler


class StepTimer:
    """Remembers when the last step ended, and the counts up to then. Times are in seconds of one monotonic clock."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool, block_bytes: int) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._block_bytes = block_bytes
        self._ended_at: float | None = None
        self._counts = SchedulerCounts()

    def __repr__(self) -> str:
        return f"<StepTimer, last step until {self._ended_at}>"

    def reset(self) -> None:
        """Notes that there is nothing to do, so that the time until the next step is no gap."""
        self._ended_at = None

    def record(self, plan: StepPlan, began: float, ended: float, follower_tokens: int, seen: SeenLogits) -> StepStats:
        """Returns a computed step's stats, before the scheduler takes its results."""
        decodes = sum(part.sequence.is_decoding for part in plan.scheduled)
        prompts = len(plan.scheduled) - decodes
        gap_s = 0.0 if self._ended_at is None else began - self._ended_at
        counts = self._scheduler.counts
        new = SchedulerCounts(*(now - before for now, before in zip(counts, self._counts, strict=True)))
        self._ended_at, self._counts = ended, counts
        return StepStats(
            StepKind.DECODE if not prompts else StepKind.MIXED if decodes else StepKind.PREFILL,
            ended - began,
            gap_s,
            follower_tokens,
            new.preemptions,
            new.restored_tokens,
            new.recomputed_tokens,
            new.evicted_blocks,
            new.offloaded_blocks * self._block_bytes,
            new.onloaded_blocks * self._block_bytes,
            new.saved_checkpoints,
            new.restored_checkpoints,
            new.evicted_checkpoints,
            new.poisoned_shares,
            0 if self._pool.checkpoints is None else self._pool.checkpoints.used_bytes,
            seen.sampled,
            seen.non_finite,
            new.ahead_tokens,
            new.used_ahead_tokens,
        )


def kv_pool_stats(lanes: BorrowedLanes | None, lane_bytes: int) -> KvPoolStats | None:
    """Returns a replica's part of the memory that replicas share; None if it shares none."""
    usage = None if lanes is None else lanes.usage()
    if lanes is None or usage is None:
        return None
    budget, held, share, cap, _ = usage
    idle, used = lanes.take_reclaimed()
    return KvPoolStats(budget, held, share, cap, idle * lane_bytes, used * lane_bytes)
