"""The step loop: takes commands, plans, runs, commits, hands out. One thread; no policy."""

import contextlib
import queue
import time
from array import array
from collections.abc import Callable

import structlog

from tokenbus.worker.engine.embedding import Embeddings, Job
from tokenbus.worker.engine.kv.blocks import BlockPool
from tokenbus.worker.engine.kv.tree import Domain
from tokenbus.worker.engine.process import frames
from tokenbus.worker.engine.process.settings import Pressure
from tokenbus.worker.engine.process.turnstile import Turnstile
from tokenbus.worker.engine.process.watch import StepWatch
from tokenbus.worker.engine.runner import DeviceError, NoRoomError, Runner
from tokenbus.worker.engine.scheduling.pace import Pace, TransferPace
from tokenbus.worker.engine.scheduling.plan import Advance, StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import End, Sequence

_IDLE_TOKENS = 256
"""Cached tokens that stay on the device where there is host memory for the rest: all that are held slow every step of
every stream, by 11 % for 4,096 and 35 % for 16,384 with four streams of a 0.5B shape, and a prompt of 1,000 tokens by
13 % for 1,000 and 20 % for 2,000 (decision 0020); to bring 1,000 back takes a few milliseconds."""

Inbox = queue.SimpleQueue[frames.Add | frames.Abort | frames.ClearCache | Job | BaseException | None]
"""Commands for the loop; None ends it, and so does an exception, which it raises."""


class StepLoop:
    """Runs sequences on a runner. `report` is called on the loop's thread with what each step did.

    With `debug` every block is checked whenever there is nothing to compute, and not only what is counted."""

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        report: Callable[[frames.StepReport | frames.SteppedAlone | frames.Embeddings], None],
        step_target_s: float,
        pressure: Pressure | None = None,
        turnstile: Turnstile | None = None,
        *,
        debug: bool = False,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._report = report
        self._scheduler = _make_scheduler(runner, pressure or Pressure())
        self._check_at_rest = self._scheduler.check_integrity if debug else self._scheduler.check_counts
        most = runner.config.max_num_batched_tokens - runner.config.max_num_seqs
        self._pace = Pace(step_target_s, min_tokens=min(32, most), max_tokens=most)
        self._transfers = TransferPace(step_target_s / 10)
        self._watch = StepWatch(self._scheduler)
        self._note: frames.StepNote | None = None
        self._embeddings = Embeddings(
            runner.embedder,
            runner.config.max_num_batched_tokens,
            lambda ticket, reply: report(frames.Embeddings(ticket, reply)),
        )
        self._watched: dict[int, Sequence] = {}
        self._turnstile = turnstile or Turnstile()
        self._alone: Sequence | None = None
        """Whom the turnstile is closed for."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<StepLoop {self._scheduler!r}>"

    def run(self) -> None:
        """Steps until the inbox says None. Raises what the inbox holds to be raised, and DeviceError."""
        try:
            while (advances := self._take_commands()) is not None:
                plan = self._plan()
                self._set_alone(self._scheduler.suspect)
                with contextlib.nullcontext() if self._alone else self._turnstile.step():
                    failed = self._begin(plan)
                    advances += failed
                    advances += self._step(_without(plan, failed))
                    self._embeddings.step()
                self._hand_out(advances)
                if self._scheduler.suspect is None:
                    self._set_alone(None)
        finally:
            self._set_alone(None)

    def _take_commands(self) -> list[Advance] | None:
        """Carries out all commands there are, waiting for one while there is nothing else to do."""
        advances: list[Advance] = []
        while not self._inbox.empty() or not (self._scheduler.has_work or advances or self._embeddings.has_work):
            if self._inbox.empty():
                self._watch.rest()
            command = self._inbox.get()
            match command:
                case None:
                    return None
                case BaseException():
                    raise command
                case Job():
                    self._embeddings.add(command)
                case frames.Add():
                    self._take(command)
                case frames.Abort(seq_no):
                    advance = self._scheduler.abort(seq_no)
                    advances += [advance] if advance is not None else []
                case frames.ClearCache():
                    self._scheduler.clear_cache()
                    self._hand_out([])
        return advances

    def _take(self, command: frames.Add) -> None:
        """Nothing has been changed where a sequence can't be taken, so that the others may go on."""
        try:
            self._add(command)
        except Exception:  # outermost frame of a sequence: it ends, and not the engine
            self._log.exception("sequence_failed", seq_no=command.seq_no)
            failed = frames.SequenceOutput(command.seq_no, None, End.FAILED)
            self._report(frames.StepReport([], [failed], self._scheduler.load()))

    def _add(self, command: frames.Add) -> None:
        token_ids = array("I")
        token_ids.frombytes(command.token_ids)
        sequence = Sequence(
            command.seq_no,
            token_ids,
            command.sampling,
            self._runner.end_token_ids,
            domain=None if command.domain is None else Domain(*command.domain),
            priority=command.priority,
            came_at=time.monotonic(),
            num_sampled=command.num_sampled,
            alone=command.alone,
        )
        self._scheduler.add(sequence)
        if command.return_progress:
            self._watched[sequence.seq_no] = sequence

    def _plan(self) -> StepPlan:
        """While nobody decodes nobody is kept waiting, and a prompt may take whole steps for itself."""
        budget = self._pace.prefill_budget(self._scheduler.num_decoding)
        return self._scheduler.plan(budget, self._transfers.blocks)

    def _begin(self, plan: StepPlan) -> list[Advance]:
        """Says which sequences are new, before the step that computes their prompts, and prepares them. Those that
        can't be prepared end."""
        if plan.started:  # before anything is done with them, so that what they may break is known to be theirs
            started = [sequence.seq_no for sequence in plan.started]
            self._report(frames.StepReport(started, [], self._scheduler.load()))
        failed = [sequence for sequence in plan.started if not self._prepare(sequence)]
        if plan.moves:
            began = time.monotonic()
            self._runner.apply(plan.moves)
            self._transfers.observe(plan.moves, time.monotonic() - began)
        return [self._scheduler.end(sequence, End.FAILED) for sequence in failed]

    def _prepare(self, sequence: Sequence) -> bool:
        try:
            self._runner.begin(sequence.seq_no, sequence.sampling)
        except DeviceError:
            raise
        except Exception:  # outermost frame of a sequence: it ends, and not the engine
            self._log.exception("sequence_failed", seq_no=sequence.seq_no)
            return False
        return True

    def _set_alone(self, suspect: Sequence | None) -> None:
        """Has the device for one sequence alone, and says so before its first step; None lets all others in again."""
        if suspect is self._alone:
            return
        if self._alone is None:
            self._turnstile.close()
        self._alone = suspect
        if suspect is None:
            self._turnstile.open()
        else:
            self._report(frames.SteppedAlone(suspect.seq_no))

    def _step(self, plan: StepPlan) -> list[Advance]:
        if not plan.parts:
            return []
        began = time.monotonic()
        try:
            sampled = self._runner.step(plan)
        except NoRoomError:
            return self._give_way()
        ended = time.monotonic()
        self._pace.observe(plan.num_tokens, ended - began)
        self._note = self._watch.note(plan, began, ended)
        return self._scheduler.commit(plan, sampled)

    def _give_way(self) -> list[Advance]:
        self._log.error("no_kv_room", load=repr(self._scheduler))
        advance = self._scheduler.give_way()
        return [] if advance is None else [advance]

    def _hand_out(self, advances: list[Advance]) -> None:
        for advance in advances:
            if advance.end is not None:
                self._runner.finish(advance.sequence.seq_no)
        outputs = [_output(advance) for advance in advances]
        progress = self._progress(advances)
        removed, stored = self._scheduler.take_changes()
        pairs = [(new.parent, new.hash) for new in stored]
        note, self._note = self._note, None
        self._report(frames.StepReport([], outputs, self._scheduler.load(), progress, removed, pairs, note))
        if not self._scheduler.has_work:
            self._check_at_rest()

    def _progress(self, advances: list[Advance]) -> list[frames.PromptProgress]:
        """How far the prompts are that somebody watches; nobody does any more once there is a token."""
        for advance in advances:
            self._watched.pop(advance.sequence.seq_no, None)
        watched = [sequence for sequence in self._watched.values() if sequence.lane is not None]
        return [frames.PromptProgress(one.seq_no, one.num_computed, one.num_cached) for one in watched]


def _without(plan: StepPlan, failed: list[Advance]) -> StepPlan:
    """The plan without the parts of those that have ended since it was made."""
    gone = {advance.sequence.seq_no for advance in failed}
    if not gone:
        return plan
    return plan._replace(parts=tuple(part for part in plan.parts if part.sequence.seq_no not in gone))


def _output(advance: Advance) -> frames.SequenceOutput:
    sequence, sampled, end = advance
    first = sampled is not None and sequence.num_sampled == 1
    return frames.SequenceOutput(
        sequence.seq_no,
        None if sampled is None else sampled.token_id,
        end,
        None if sampled is None else sampled.logprob,
        sequence.num_cached if first else None,
    )


def _make_scheduler(runner: Runner, pressure: Pressure) -> Scheduler:
    config = runner.config
    idle = pressure.max_idle_blocks
    if idle is None and config.host_kv_blocks:
        idle = _IDLE_TOKENS // config.kv_block_size
    pool = BlockPool(
        config.total_kv_blocks,
        config.kv_block_size,
        runner.num_lanes,
        fingerprint=config.fingerprint,
        can_share=config.prefix_cache,
        host_blocks=config.host_kv_blocks,
        overcommit=pressure.overcommit,
    )
    return Scheduler(pool, config.max_num_seqs, priority_s=pressure.priority_s, max_idle_blocks=idle)
