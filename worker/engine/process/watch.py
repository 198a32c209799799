"""Times the steps of a loop, for the metrics."""

from tokenbus.worker.engine.process.frames import StepKind, StepNote
from tokenbus.worker.engine.scheduling.plan import StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler


class StepWatch:
    """Times are in seconds of one monotonic clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ended_at: float | None = None
        self._preemptions = 0
        self._evicted_blocks = 0

    def __repr__(self) -> str:
        return f"<StepWatch, last step until {self._ended_at}>"

    def rest(self) -> None:
        """There is nothing to do: what follows is no gap."""
        self._ended_at = None

    def note(self, plan: StepPlan, began: float, ended: float) -> StepNote:
        """What a step that was computed comes to."""
        gap_s = 0.0 if self._ended_at is None else began - self._ended_at
        preemptions, evicted_blocks = self._scheduler.preemptions, self._scheduler.evicted_blocks
        note = StepNote(
            _kind(plan), ended - began, gap_s, preemptions - self._preemptions, evicted_blocks - self._evicted_blocks
        )
        self._ended_at, self._preemptions, self._evicted_blocks = ended, preemptions, evicted_blocks
        return note


def _kind(plan: StepPlan) -> StepKind:
    decodes = sum(part.num_tokens == 1 and part.samples for part in plan.parts)
    if decodes == len(plan.parts):
        return StepKind.DECODE
    return StepKind.MIXED if decodes else StepKind.PREFILL
