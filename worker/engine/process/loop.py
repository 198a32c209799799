"""The step loop of a replica: takes commands, schedules, runs, updates, reports. One thread; no policy."""

import contextlib
import queue
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.constraints.compilation import (
    Compilation,
    CompiledConstraint,
    CompileJob,
    CompileStarted,
    ConstraintRefusal,
)
from tokenbus.worker.engine.constraints.compiler import ModelTokens
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher
from tokenbus.worker.engine.device.pooling import PoolingJob, PoolingQueue
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.process import ipc, scheduler_setup
from tokenbus.worker.engine.process.block_transfers import BlockTransfers
from tokenbus.worker.engine.process.device_sharing import StepGate
from tokenbus.worker.engine.process.memory_check import MemoryCheck
from tokenbus.worker.engine.process.resumed_tokens import Reading, ResumedTokens
from tokenbus.worker.engine.process.step_timer import StepTimer, kv_pool_stats
from tokenbus.worker.engine.scheduling.lanes import LaneShare
from tokenbus.worker.engine.scheduling.plan import SampledToken, SeenLogits, StepPlan, StepResult, Undone
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.step_budget import StepBudget, TransferBudget

_MATCHER_POLL_S = 0.01
"""A loop with nothing else to compute waits this long for a constraint before it checks for commands again."""

_EXPORT_S = 0.005
"""The time between two steps for blocks that other workers fetch; at least one such request is served."""


class LanesChanged(NamedTuple):
    """The number of lanes that the KV pool lends may have changed."""


Inbox = queue.SimpleQueue[
    ipc.Add
    | ipc.Abort
    | ipc.AbortPooling
    | ipc.ClearCache
    | ipc.ExpectTurn
    | ipc.ExportBlocks
    | ipc.PutBlocks
    | ipc.RetainSession
    | ipc.UnloadAdapter
    | PoolingJob
    | CompileStarted
    | CompiledConstraint
    | LanesChanged
    | BaseException
    | None
]
"""Commands for the loop. None ends it; so does an exception, which the loop raises."""


class StepLoop:
    """Runs sequences on a runner. `report` is called on the loop's thread with the results of each step.

    With `debug` the loop checks every cached block whenever it has nothing to do; without it, only counters and
    lanes."""

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        report: Callable[[ipc.Report], None],
        step_target_s: float,
        scheduler_settings: SchedulerSettings | None = None,
        step_gate: StepGate | None = None,
        *,
        lane_share: LaneShare | None = None,
        debug: bool = False,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._report = report
        settings = scheduler_settings or SchedulerSettings()
        self._pool = scheduler_setup.make_pool(runner, settings)
        self._scheduler = scheduler_setup.make_scheduler(runner, self._pool, settings, lane_share)
        self._memory_check = MemoryCheck(runner, self._pool, report)
        self._copies = runner.copies
        if self._copies is not None:
            self._copies.reject(self._pool.prefixes.recover(self._copies.recovered))
        self._check_when_idle = self._scheduler.check_integrity if debug else self._scheduler.check_counts
        # Each running sequence may decode a token alongside the prompts.
        most = runner.config.max_num_batched_tokens - runner.config.max_num_seqs
        tile_rows = 1 if runner.row_tiles is None else runner.row_tiles.rows
        self._step_budget = StepBudget(step_target_s, min_tokens=min(32, most), max_tokens=most, tile_rows=tile_rows)
        self._transfer_budget = TransferBudget(step_target_s / 10)
        block_bytes = runner.config.kv_bytes // runner.config.total_kv_blocks
        self._step_timer = StepTimer(self._scheduler, self._pool, block_bytes)
        self._block_transfers = BlockTransfers(runner, self._pool, report, _EXPORT_S)
        self._pooling = PoolingQueue(
            lambda call_ids: report(ipc.PoolingBatch(call_ids)),
            lambda call_id, result: report(ipc.PoolResult(call_id, *result)),
            StepBudget(step_target_s, min_tokens=min(32, most), max_tokens=most, tile_rows=tile_rows),
        )
        self._had_prompts = False
        """Whether the last step computed prompts, which take turns with inputs to pool."""
        self._compilation = Compilation(
            lambda: ModelTokens(runner.token_bytes, runner.end_token_ids, runner.encode),
            2 * runner.config.max_num_seqs,
            inbox.put,
        )
        self._compiling: dict[int, ipc.Add] = {}
        """Sequences whose constraints are being compiled, or wait to be."""
        self._resumed = ResumedTokens(runner.reasoning_closer)
        self._unloading: list[str] = []
        """Adapters to unload once no sequence uses them."""
        self._watched: dict[int, Sequence] = {}
        """Sequences whose clients want their prompts' progress."""
        self._step_gate = step_gate or StepGate()
        self._isolated: Sequence | None = None
        """The sequence for which this loop has closed the step gate."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<StepLoop {self._scheduler!r}>"

    def take_recovered(self) -> list[tuple[int, int]]:
        """Returns the blocks cached from the start, in the form of a `StepReport`."""
        return [(new.parent, new.hash) for new in self._pool.prefixes.take_events().stored]

    def run(self) -> None:
        """Steps until the inbox holds None. Raises an exception that the inbox holds, and DeviceError."""
        try:
            while (results := self._take_commands()) is not None:
                for reading in self._resumed.read():
                    self._add_sequence(reading.command, reading.matcher, reading)
                self._wait_for_matchers()
                num_decoding = self._scheduler.num_decoding
                pools = self._pooling.has_work and self._had_prompts
                prefill_tokens = 0 if pools else self._step_budget.prefill_tokens(num_decoding)
                self._step_gate.note_work(self, has_work=self._scheduler.has_work)
                plan = self._scheduler.schedule(
                    prefill_tokens,
                    self._transfer_budget.blocks,
                    time.monotonic(),
                    ahead_tokens=self._step_budget.ahead_tokens if self._may_compute_ahead else 0,
                )
                for turn in self._scheduler.next_turns.take_done():
                    self._log.info("next_turn_computed", tokens=turn.num_computed, cached_tokens=turn.first)
                self._had_prompts = not all(part.sequence.is_decoding for part in plan.scheduled)
                self._isolate(self._scheduler.isolated)
                with contextlib.nullcontext() if self._isolated else self._step_gate.step():
                    began = time.monotonic()
                    failed = self._start(plan)
                    step_results, stats = self._step(plan, failed)
                    if self._pooling.has_work and not self._had_prompts:
                        left_s = self._step_budget.target_s(num_decoding) - (time.monotonic() - began)
                        self._pooling.step(left_s, is_alone=not self._scheduler.has_work)
                        self._step_timer.reset()  # the device was not idle
                self._block_transfers.step()
                self._report_results([*results, *failed, *step_results], stats)
                self._unload_adapters()
                if self._scheduler.isolated is None:
                    self._isolate(None)
        finally:
            self._compilation.close()
            self._isolate(None)

    def _take_commands(self) -> list[StepResult] | None:
        """Carries out all pending commands, and waits for one while there is nothing else to do.

        Returns the results of aborts, or None if the loop should end."""
        results: list[StepResult] = []
        while not self._inbox.empty() or not (results or self._has_work):
            if self._inbox.empty():
                self._step_timer.reset()
                self._step_gate.note_work(self, has_work=False)
            command = self._inbox.get()
            match command:
                case None:
                    return None
                case BaseException():
                    raise command
                case PoolingJob():
                    self._pooling.add(command)
                case ipc.AbortPooling(call_id):
                    self._pooling.abort(call_id)
                case ipc.Add(constraint=None):
                    self._add_sequence(command, None)
                case ipc.Add():
                    self._compile_constraint(command)
                case CompileStarted(seq_no):
                    self._report(ipc.ConstraintStarted(seq_no))
                case CompiledConstraint():
                    self._add_constrained(command)
                case ipc.Abort(seq_no) if seq_no in self._compiling:
                    del self._compiling[seq_no]
                    self._compilation.cancel(seq_no)
                    self._report_end(seq_no, EngineFinishReason.ABORTED)
                case ipc.Abort(seq_no) if self._resumed.abort(seq_no):
                    self._report_end(seq_no, EngineFinishReason.ABORTED)
                case ipc.Abort(seq_no):
                    result = self._scheduler.abort(seq_no)
                    results += [result] if result is not None else []
                case ipc.ExportBlocks():
                    self._block_transfers.add(command)
                case ipc.PutBlocks():
                    self._block_transfers.put(command)
                    self._report_results([], None)
                case ipc.RetainSession(tenant, session, ttl_s):
                    self._pool.prefixes.retention.expire(time.monotonic())
                    self._pool.retain_session((tenant, session), ttl_s)
                    self._report_results([], None)
                case ipc.ExpectTurn():
                    self._scheduler.next_turns.add(scheduler_setup.make_turn(command))
                case ipc.UnloadAdapter(digest):
                    self._scheduler.next_turns.forget(digest)
                    self._unloading.append(digest)
                    self._unload_adapters()
                case ipc.ClearCache():
                    self._clear_cache()
                case LanesChanged():
                    assert self._scheduler.borrowed_lanes is not None
                    self._scheduler.borrowed_lanes.ask_again()
        return results

    @property
    def _has_work(self) -> bool:
        has_blocks_to_move = self._pool.prefixes.has_unsaved or self._block_transfers.has_work  # even if nothing runs
        has_sequences = self._scheduler.has_work or len(self._resumed) > 0
        return has_sequences or has_blocks_to_move or self._pooling.has_work or self._may_compute_ahead

    @property
    def _may_compute_ahead(self) -> bool:
        """Whether there are turns to compute that are only expected, and nobody wants the device now."""
        if not self._scheduler.next_turns or self._scheduler.has_work:
            return False
        is_wanted = self._pooling.has_work or self._compiling or len(self._resumed) or self._block_transfers.has_work
        return not is_wanted and not self._step_gate.is_wanted_beside(self)

    def _clear_cache(self) -> None:
        """Drops everything that no sequence uses, in host memory too."""
        self._scheduler.next_turns.forget()
        self._pool.clear()
        self._runner.apply(self._pool.cache.ops.take())
        if self._copies is not None:
            self._copies.zero()
        self._report_results([], None)

    def _unload_adapters(self) -> None:
        """Unloads the adapters that are no longer wanted and that no sequence uses."""
        if not self._unloading:
            return
        coming = (*self._compiling.values(), *self._resumed.commands)
        sets = [one.adapters for one in self._scheduler.sequences] + [one.adapters for one in coming]
        used = {adapter.digest for adapters in sets for adapter in adapters}
        for digest in [digest for digest in self._unloading if digest not in used]:
            assert self._runner.adapters is not None
            self._runner.adapters.unload(digest)
            self._unloading.remove(digest)

    def _compile_constraint(self, command: ipc.Add) -> None:
        """Starts compiling a sequence's constraint; the result comes back as a command."""
        assert command.constraint is not None
        token_ids = block_hash.unpack_token_ids(command.token_ids)
        sampled = token_ids[len(token_ids) - command.num_sampled :].tolist()
        self._compiling[command.seq_no] = command
        job = CompileJob(command.seq_no, command.tenant, command.constraint, sampled)
        self._compilation.submit(job, is_suspect=command.isolated)

    def _add_constrained(self, compiled: CompiledConstraint) -> None:
        """Reports that a constraint was compiled, and if so, gives its sequence to the scheduler."""
        seq_no, seconds, result = compiled
        command = self._compiling.pop(seq_no, None)
        if command is None:  # it was aborted meanwhile
            if not isinstance(result, ConstraintRefusal):
                result.close()
            return
        if isinstance(result, ConstraintRefusal):
            self._report(ipc.ConstraintCompiled(seq_no, seconds, result.problem, result.is_too_costly))
            return
        self._report(ipc.ConstraintCompiled(seq_no, seconds))
        self._add_sequence(command, result)

    def _add_sequence(self, command: ipc.Add, matcher: SequenceMatcher | None, reading: Reading | None = None) -> None:
        """Gives a sequence to the scheduler, once the tokens that it already has are read for its reasoning budget; one
        that can't be created ends, without affecting the others."""
        try:
            budget = self._resumed.new_budget(command) if reading is None else reading.take_budget()
            if reading is None and budget is not None and command.num_sampled:
                self._resumed.add(command, matcher, budget)
                return
            token_ids = block_hash.unpack_token_ids(command.token_ids)
            for one in command.adapters:
                if self._runner.adapters is None or one.digest not in self._runner.adapters:
                    raise LookupError(f"adapter {one.digest} is not loaded")
            sequence = Sequence(
                command.seq_no,
                token_ids,
                command.sampling,
                self._runner.end_token_ids,
                adapters=command.adapters,
                domain=None if command.domain is None else Domain(*command.domain, command.adapters),
                priority=command.priority,
                arrived_at=time.monotonic(),
                num_resumed=command.num_sampled,
                isolated=command.isolated,
                matcher=matcher,
                hint=command.hint,
                reasoning_budget=budget,
                logprobs_from=command.logprobs_from,
            )
            self._scheduler.add(sequence)
        except Exception:  # outermost frame of a sequence: it ends, the engine does not
            self._log.exception("sequence_failed", seq_no=command.seq_no)
            if matcher is not None:
                matcher.close()
            self._report_end(command.seq_no, EngineFinishReason.FAILED)
            return
        if command.return_progress:
            self._watched[sequence.seq_no] = sequence

    def _wait_for_matchers(self) -> None:
        """Takes the results of matchers in other processes; waits for one only if there is nothing to compute."""
        matchers = [one.matcher for one in self._scheduler.running if one.matcher is not None and not one.is_ready]
        for matcher in matchers:
            matcher.wait(0)
        isolated = self._scheduler.isolated
        if matchers and not any(one.is_ready for one in ([isolated] if isolated else self._scheduler.sequences)):
            matchers[0].wait(_MATCHER_POLL_S)

    def _report_end(self, seq_no: int, finish_reason: EngineFinishReason) -> None:
        """Reports the end of a sequence that the scheduler does not have."""
        ended = ipc.SequenceOutput(seq_no, [], finish_reason)
        self._report(ipc.StepReport([], [ended], self._scheduler.load()))

    def _start(self, plan: StepPlan) -> list[StepResult]:
        """Reports which sequences start, gives them to the runner, and applies the plan's KV ops.

        Returns the results of those that the runner could not take."""
        if plan.started:  # reported before anything is done with them, so that a crash can be attributed to them
            started = [sequence.seq_no for sequence in plan.started]
            self._report(ipc.StepReport(started, [], self._scheduler.load()))
        for one in plan.preempted:
            self._log.info("sequence_preempted", seq_no=one.seq_no, tokens=one.num_tokens, preemptions=one.preemptions)
        failed = [sequence for sequence in plan.started if not self._add_to_runner(sequence)]
        if plan.kv_ops:
            began = time.monotonic()
            self._runner.apply(plan.kv_ops)
            self._transfer_budget.observe(plan.kv_ops, time.monotonic() - began)
        if self._copies is not None:
            self._copies.seal(plan.labels)
        if self._scheduler.borrowed_lanes is not None:
            self._scheduler.borrowed_lanes.give_back()
        return [self._scheduler.finish(sequence, EngineFinishReason.FAILED) for sequence in failed]

    def _add_to_runner(self, sequence: Sequence) -> bool:
        try:
            self._runner.add_sequence(sequence.seq_no, sequence.sampling)
        except DeviceError:
            raise
        except Exception:  # outermost frame of a sequence: it ends, the engine does not
            self._log.exception("sequence_failed", seq_no=sequence.seq_no)
            return False
        return True

    def _isolate(self, sequence: Sequence | None) -> None:
        """Reserves the device for one sequence, and reports that before its first step; None opens it to all again."""
        if sequence is self._isolated:
            return
        if self._isolated is None:
            self._step_gate.close()
        self._isolated = sequence
        if sequence is None:
            self._step_gate.open()
        else:
            self._report(ipc.StepIsolated(sequence.seq_no))

    def _step(self, plan: StepPlan, failed: list[StepResult]) -> tuple[list[StepResult], ipc.StepStats | None]:
        """Runs a plan without the sequences that have failed since it was made."""
        if failed:
            gone = {result.sequence.seq_no for result in failed}
            plan = plan._replace(scheduled=tuple(one for one in plan.scheduled if one.sequence.seq_no not in gone))
        if not plan.scheduled:
            return [], None
        began = time.monotonic()
        outcomes = self._runner.step(plan)
        ended = time.monotonic()
        is_whole = not any(isinstance(one, Undone) for one in outcomes)
        if is_whole and not plan.is_ahead:  # other steps' times say nothing about this many tokens
            self._step_budget.observe(plan.num_tokens, ended - began)
        seen = SeenLogits() if self._runner.logits is None else self._runner.logits.take()
        if not is_whole:
            self._memory_check.log_undone(plan, outcomes, seen, self._scheduler)
        followers = sum(len(one.followers) for one in outcomes if isinstance(one, SampledToken))
        stats = self._step_timer.record(plan, began, ended, followers, seen)
        results = self._scheduler.update(plan, outcomes)
        if not is_whole or self._memory_check.has_suspects:
            self._memory_check.after_step(plan, outcomes, results, self._scheduler.sequences)
        return results, stats

    def _report_results(self, results: list[StepResult], stats: ipc.StepStats | None) -> None:
        outputs, watched = [], []
        for sequence, sampled, finish_reason in results:
            if finish_reason is not None:
                self._runner.remove_sequence(sequence.seq_no)
                if sequence.matcher is not None:
                    sequence.matcher.close()
            was_watched = self._watched.pop(sequence.seq_no, None) is not None  # a prompt is done with its first token
            if sampled is None:
                outputs.append(ipc.SequenceOutput(sequence.seq_no, [], finish_reason))
                continue
            watched += [sequence] if was_watched else []
            token_ids, logprob = sampled.token_ids, sampled.logprob
            is_first = sequence.num_sampled == len(token_ids)
            outputs.append(
                ipc.SequenceOutput(
                    sequence.seq_no,
                    token_ids,
                    finish_reason,
                    [] if logprob is None else [logprob],
                    sequence.num_cached if is_first else None,
                )
            )
        watched += [sequence for sequence in self._watched.values() if sequence.lane is not None]
        progress = [ipc.PromptProgress(one.seq_no, one.num_computed, one.num_cached) for one in watched]
        removed, stored = self._pool.prefixes.take_events()
        pairs = [(new.parent, new.hash) for new in stored]
        load = self._scheduler.load()
        kv_pool = kv_pool_stats(self._scheduler.borrowed_lanes, self._runner.config.kv_lane_bytes)
        scored = [] if self._runner.prompt_scores is None else self._runner.prompt_scores.take()
        self._report(ipc.StepReport([], outputs, load, progress, removed, pairs, stats, kv_pool, scored))
        if not self._scheduler.has_work:
            self._check_when_idle()
