"""The step loop: takes commands, plans, runs, commits, hands out. One thread; no policy."""

import contextlib
import queue
import time
from array import array
from collections.abc import Callable

import structlog

from tokenbus.worker.engine.embedding import EmbedJob, EmbedQueue
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.settings import SchedulerSettings
from tokenbus.worker.engine.process.step_gate import StepGate
from tokenbus.worker.engine.process.step_timer import StepTimer
from tokenbus.worker.engine.runner import DeviceError, InsufficientMemoryError, Runner
from tokenbus.worker.engine.scheduling.plan import StepPlan, StepResult
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.step_budget import StepBudget, TransferBudget

_IDLE_TOKENS = 256
"""Cached tokens that stay on the device where there is host memory for the rest: all that are held slow every step of
every stream, by 11 % for 4,096 and 35 % for 16,384 with four streams of a 0.5B shape, and a prompt of 1,000 tokens by
13 % for 1,000 and 20 % for 2,000 (decision 0020); to bring 1,000 back takes a few milliseconds."""

Inbox = queue.SimpleQueue[ipc.Add | ipc.Abort | ipc.ClearCache | EmbedJob | BaseException | None]
"""Commands for the loop; None ends it, and so does an exception, which it raises."""


class StepLoop:
    """Runs sequences on a runner. `report` is called on the loop's thread with what each step did.

    With `debug` every block is checked whenever there is nothing to compute, and not only what is counted."""

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        report: Callable[[ipc.StepReport | ipc.StepIsolated | ipc.EmbedResult], None],
        step_target_s: float,
        scheduler_settings: SchedulerSettings | None = None,
        step_gate: StepGate | None = None,
        *,
        debug: bool = False,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._report = report
        self._scheduler = _make_scheduler(runner, scheduler_settings or SchedulerSettings())
        self._check_at_rest = self._scheduler.check_integrity if debug else self._scheduler.check_counts
        most = runner.config.max_num_batched_tokens - runner.config.max_num_seqs
        self._step_budget = StepBudget(step_target_s, min_tokens=min(32, most), max_tokens=most)
        self._transfer_budget = TransferBudget(step_target_s / 10)
        self._step_timer = StepTimer(self._scheduler)
        self._step_stats: ipc.StepStats | None = None
        self._embeddings = EmbedQueue(
            runner.embedder,
            runner.config.max_num_batched_tokens,
            lambda call_id, reply: report(ipc.EmbedResult(call_id, reply)),
        )
        self._watched: dict[int, Sequence] = {}
        self._step_gate = step_gate or StepGate()
        self._isolated: Sequence | None = None
        """Whom the turnstile is closed for."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<StepLoop {self._scheduler!r}>"

    def run(self) -> None:
        """Steps until the inbox says None. Raises what the inbox holds to be raised, and DeviceError."""
        try:
            while (advances := self._take_commands()) is not None:
                plan = self._plan()
                self._isolate(self._scheduler.isolated)
                with contextlib.nullcontext() if self._isolated else self._step_gate.step():
                    failed = self._begin(plan)
                    advances += failed
                    advances += self._step(_without(plan, failed))
                    self._embeddings.step()
                self._hand_out(advances)
                if self._scheduler.isolated is None:
                    self._isolate(None)
        finally:
            self._isolate(None)

    def _take_commands(self) -> list[StepResult] | None:
        """Carries out all commands there are, waiting for one while there is nothing else to do."""
        advances: list[StepResult] = []
        while not self._inbox.empty() or not (self._scheduler.has_work or advances or self._embeddings.has_work):
            if self._inbox.empty():
                self._step_timer.reset()
            command = self._inbox.get()
            match command:
                case None:
                    return None
                case BaseException():
                    raise command
                case EmbedJob():
                    self._embeddings.add(command)
                case ipc.Add():
                    self._take(command)
                case ipc.Abort(seq_no):
                    advance = self._scheduler.abort(seq_no)
                    advances += [advance] if advance is not None else []
                case ipc.ClearCache():
                    self._scheduler.clear_cache()
                    self._hand_out([])
        return advances

    def _take(self, command: ipc.Add) -> None:
        """Nothing has been changed where a sequence can't be taken, so that the others may go on."""
        try:
            self._add(command)
        except Exception:  # outermost frame of a sequence: it ends, and not the engine
            self._log.exception("sequence_failed", seq_no=command.seq_no)
            failed = ipc.SequenceOutput(command.seq_no, None, EngineFinishReason.FAILED)
            self._report(ipc.StepReport([], [failed], self._scheduler.load()))

    def _add(self, command: ipc.Add) -> None:
        token_ids = array("I")
        token_ids.frombytes(command.token_ids)
        sequence = Sequence(
            command.seq_no,
            token_ids,
            command.sampling,
            self._runner.end_token_ids,
            domain=None if command.domain is None else Domain(*command.domain),
            priority=command.priority,
            arrived_at=time.monotonic(),
            num_sampled=command.num_sampled,
            isolated=command.isolated,
        )
        self._scheduler.add(sequence)
        if command.return_progress:
            self._watched[sequence.seq_no] = sequence

    def _plan(self) -> StepPlan:
        """While nobody decodes nobody is kept waiting, and a prompt may take whole steps for itself."""
        budget = self._step_budget.prefill_tokens(self._scheduler.num_decoding)
        return self._scheduler.schedule(budget, self._transfer_budget.blocks)

    def _begin(self, plan: StepPlan) -> list[StepResult]:
        """Says which sequences are new, before the step that computes their prompts, and prepares them. Those that
        can't be prepared end."""
        if plan.started:  # before anything is done with them, so that what they may break is known to be theirs
            started = [sequence.seq_no for sequence in plan.started]
            self._report(ipc.StepReport(started, [], self._scheduler.load()))
        failed = [sequence for sequence in plan.started if not self._prepare(sequence)]
        if plan.kv_ops:
            began = time.monotonic()
            self._runner.apply(plan.kv_ops)
            self._transfer_budget.observe(plan.kv_ops, time.monotonic() - began)
        return [self._scheduler.finish(sequence, EngineFinishReason.FAILED) for sequence in failed]

    def _prepare(self, sequence: Sequence) -> bool:
        try:
            self._runner.add_sequence(sequence.seq_no, sequence.sampling)
        except DeviceError:
            raise
        except Exception:  # outermost frame of a sequence: it ends, and not the engine
            self._log.exception("sequence_failed", seq_no=sequence.seq_no)
            return False
        return True

    def _isolate(self, suspect: Sequence | None) -> None:
        """Has the device for one sequence alone, and says so before its first step; None lets all others in again."""
        if suspect is self._isolated:
            return
        if self._isolated is None:
            self._step_gate.close()
        self._isolated = suspect
        if suspect is None:
            self._step_gate.open()
        else:
            self._report(ipc.StepIsolated(suspect.seq_no))

    def _step(self, plan: StepPlan) -> list[StepResult]:
        if not plan.scheduled:
            return []
        began = time.monotonic()
        try:
            sampled = self._runner.step(plan)
        except InsufficientMemoryError:
            return self._reclaim_memory()
        ended = time.monotonic()
        self._step_budget.observe(plan.num_tokens, ended - began)
        self._step_stats = self._step_timer.record(plan, began, ended)
        return self._scheduler.update(plan, sampled)

    def _reclaim_memory(self) -> list[StepResult]:
        self._log.error("kv_memory_exhausted", load=repr(self._scheduler))
        advance = self._scheduler.reclaim_memory()
        return [] if advance is None else [advance]

    def _hand_out(self, advances: list[StepResult]) -> None:
        for advance in advances:
            if advance.finish_reason is not None:
                self._runner.remove_sequence(advance.sequence.seq_no)
        outputs = [_output(advance) for advance in advances]
        progress = self._progress(advances)
        removed, stored = self._scheduler.take_kv_events()
        pairs = [(new.parent, new.hash) for new in stored]
        stats, self._step_stats = self._step_stats, None
        self._report(ipc.StepReport([], outputs, self._scheduler.load(), progress, removed, pairs, stats))
        if not self._scheduler.has_work:
            self._check_at_rest()

    def _progress(self, advances: list[StepResult]) -> list[ipc.PromptProgress]:
        """How far the prompts are that somebody watches; nobody does any more once there is a token."""
        for advance in advances:
            self._watched.pop(advance.sequence.seq_no, None)
        watched = [sequence for sequence in self._watched.values() if sequence.lane is not None]
        return [ipc.PromptProgress(one.seq_no, one.num_computed, one.num_cached) for one in watched]


def _without(plan: StepPlan, failed: list[StepResult]) -> StepPlan:
    """The plan without the parts of those that have ended since it was made."""
    gone = {advance.sequence.seq_no for advance in failed}
    if not gone:
        return plan
    return plan._replace(scheduled=tuple(part for part in plan.scheduled if part.sequence.seq_no not in gone))


def _output(advance: StepResult) -> ipc.SequenceOutput:
    sequence, sampled, end = advance
    first = sampled is not None and sequence.num_sampled == 1
    return ipc.SequenceOutput(
        sequence.seq_no,
        None if sampled is None else sampled.token_id,
        end,
        None if sampled is None else sampled.logprob,
        sequence.num_cached if first else None,
    )


def _make_scheduler(runner: Runner, scheduler_settings: SchedulerSettings) -> Scheduler:
    config = runner.config
    idle = scheduler_settings.max_cached_blocks
    if idle is None and config.host_kv_blocks:
        idle = _IDLE_TOKENS // config.kv_block_size
    pool = BlockPool(
        config.total_kv_blocks,
        config.kv_block_size,
        runner.num_lanes,
        fingerprint=config.fingerprint,
        can_share=config.prefix_cache,
        host_blocks=config.host_kv_blocks,
        overcommit=scheduler_settings.overcommit,
    )
    return Scheduler(pool, config.max_num_seqs, priority_s=scheduler_settings.priority_s, max_cached_blocks=idle)
