"""The step timer makes the stats of each step, from which the frontend makes metrics."""

from tokenbus.worker.engine.process.ipc import StepKind, StepStats
from tokenbus.worker.engine.scheduling.plan import StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler


class StepTimer:
    """Remembers when the last step ended, and the counts until then. Times are in seconds of one monotonic clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ended_at: float | None = None
        self._preemptions = 0
        self._evicted_blocks = 0

    def __repr__(self) -> str:
        return f"<StepTimer, last step until {self._ended_at}>"

    def reset(self) -> None:
        """Notes that there is nothing to do, so that the time until the next step is no gap."""
        self._ended_at = None

    def record(self, plan: StepPlan, began: float, ended: float, follower_tokens: int = 0) -> StepStats:
        """Returns the stats of a step that was computed, before the scheduler takes its results."""
        gap_s = 0.0 if self._ended_at is None else began - self._ended_at
        preemptions, evicted_blocks = self._scheduler.preemptions, self._scheduler.evicted_blocks
        note = StepStats(
            _kind(plan),
            ended - began,
            gap_s,
            preemptions - self._preemptions,
            evicted_blocks - self._evicted_blocks,
            follower_tokens,
        )
        self._ended_at, self._preemptions, self._evicted_blocks = ended, preemptions, evicted_blocks
        return note


def _kind(plan: StepPlan) -> StepKind:
    decodes = sum(part.sequence.is_decoding for part in plan.scheduled)
    if decodes == len(plan.scheduled):
        return StepKind.DECODE
    return StepKind.MIXED if decodes else StepKind.PREFILL
