"""Finds out whether non-finite numbers remain in the device's memory, and ends the engine if they do.

Non-finite numbers are overwritten, and their sequence is computed again, apart from others (scheduling/suspects.py).
When a sequence has failed alone so often that it would end, either it is the culprit, or overwriting does not reach
everything. The *canary* tells: a token for which the model computed finite numbers when it was loaded. If it no longer
does, every later request would fail as well. Then the engine ends, and the next one continues all streams.

The culprit was among the sequences without finite numbers in the first step that had any such. So these are suspects,
like those of a step in which an engine dies: each runs alone in the next engine until it has a token, and gets no third
engine (engine_client/engine_faults.py). A model whose canary was not finite when it was loaded has no canary, so it
does not end one engine after another.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing

import structlog

from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.plan import Outcome, ScheduledTokens, SeenLogits, StepPlan, StepResult, Undone
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

_CANARY_NO = 0
"""The number of the canary's sequence; frontends' numbers begin at 1."""


class MemoryCheck:
    """Examines what each step discarded. `pool` belongs to the replica's scheduler."""

    def __init__(self, runner: Runner, pool: BlockPool, report: Callable[[ipc.MemoryPoisoned], None]) -> None:
        self._runner = runner
        self._pool = pool
        self._report = report
        self._suspects: list[int] = []
        """The sequences whose numbers were not finite in the first such step; none while all is well."""
        self._trusted_copies = 0
        """The number of the last copy made before that step."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<MemoryCheck, canary of {len(self._runner.canary)} tokens, {len(self._suspects)} suspects>"

    @property
    def has_suspects(self) -> bool:
        """Whether it is waiting for the outcome of what a step discarded."""
        return bool(self._suspects)

    def log_undone(self, plan: StepPlan, outcomes: Listing[Outcome], seen: SeenLogits, scheduler: object) -> None:
        """Logs what a step has left undone."""
        if Undone.NO_ROOM in outcomes:
            self._log.error("kv_memory_exhausted", load=repr(scheduler))
        for part, outcome in zip(plan.scheduled, outcomes, strict=True):
            if outcome in (Undone.POISONED, Undone.LOST):
                logits = seen.poisoned.get(part.sequence.seq_no)
                self._log.warning(
                    "step_poisoned",
                    seq_no=part.sequence.seq_no,
                    tokens=part.start + part.num_tokens,
                    logits=None if logits is None else logits.to_log(),
                )

    def after_step(
        self, plan: StepPlan, outcomes: Listing[Outcome], results: Listing[StepResult], left: Listing[Sequence]
    ) -> None:
        """Checks the memory if a sequence is to end because its numbers are not finite; `left` holds the others.

        Raises DeviceError if non-finite numbers remain. Then no later engine finds a copy of a block made since the
        first of them."""
        if not self._suspects:
            pairs = zip(plan.scheduled, outcomes, strict=True)
            self._suspects = [part.sequence.seq_no for part, one in pairs if one in (Undone.POISONED, Undone.LOST)]
            if not self._suspects:
                return
            self._trusted_copies = 0 if self._runner.copies is None else self._runner.copies.last_number
        has_culprit = any(one.finish_reason is EngineFinishReason.BAD_LOGITS for one in results)
        if has_culprit and self._is_canary_poisoned():
            self._end()
        if has_culprit or not any(one.poisoned_at for one in left):
            self._suspects = []

    def _end(self) -> None:
        if self._runner.copies is not None:
            self._runner.copies.discard_after(self._trusted_copies)
        self._log.error("memory_poisoned", count=len(self._suspects))
        self._report(ipc.MemoryPoisoned(self._suspects))
        raise DeviceError("non-finite numbers stay in the device's memory though it was overwritten")

    def _is_canary_poisoned(self) -> bool:
        """Computes the canary alone, as the pool's only change, and drops it."""
        token_ids = array("I", self._runner.canary)
        if not token_ids or not self._pool.can_allocate(None, token_ids, len(token_ids)):
            return False
        sampling = engine_request.Sampling(max_tokens=1)
        canary = Sequence(_CANARY_NO, token_ids, sampling, self._runner.end_token_ids)
        canary.start(self._pool.allocate(None))
        has_room = canary.kv.allocate_blocks(len(token_ids))
        outcome: Outcome = None
        self._apply_ops()
        if has_room:
            self._runner.add_sequence(_CANARY_NO, sampling)
            (outcome,) = self._runner.step(StepPlan((ScheduledTokens(canary, 0, len(token_ids)),)))
            self._runner.remove_sequence(_CANARY_NO)
        self._pool.drop(canary.kv, trusts_others=True)
        self._apply_ops()
        return outcome in (Undone.POISONED, Undone.LOST)

    def _apply_ops(self) -> None:
        cache = self._pool.cache
        self._runner.apply(cache.ops.take())
        if self._runner.copies is not None:
            self._runner.copies.seal(self._pool.prefixes.take_labels())
