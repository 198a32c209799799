"""The step loop: takes commands, plans, runs, commits, hands out. One thread; no policy."""

import queue
import time
from collections.abc import Callable

import structlog

from protocol import blocks
from worker.engine import frames
from worker.engine.blocks import BlockPool
from worker.engine.pace import Pace
from worker.engine.plan import Advance, StepPlan
from worker.engine.runner import NoRoomError, Runner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import End, Sequence

Inbox = queue.SimpleQueue[frames.Add | frames.Abort | None]
"""Commands for the loop; None ends it."""


class StepLoop:
    """Runs sequences on a runner. `report` is called on the loop's thread with what each step did."""

    def __init__(
        self, runner: Runner, inbox: Inbox, report: Callable[[frames.StepReport], None], step_target_s: float
    ) -> None:
        config = runner.config
        self._runner = runner
        self._inbox = inbox
        self._report = report
        self._scheduler = Scheduler(BlockPool(config.total_kv_blocks, config.kv_block_size), config.max_num_seqs)
        most = config.max_num_batched_tokens - config.max_num_seqs
        self._pace = Pace(step_target_s, min_tokens=min(32, most), max_tokens=most)
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<StepLoop {self._scheduler!r}>"

    def run(self) -> None:
        """Steps until the inbox says None. Raises DeviceError when the device fails."""
        while (advances := self._take_commands()) is not None:
            plan = self._scheduler.plan(self._pace.prefill_budget)
            self._begin(plan)
            advances += self._step(plan)
            self._hand_out(advances)

    def _take_commands(self) -> list[Advance] | None:
        """Carries out all commands there are, waiting for one while there is nothing else to do."""
        advances: list[Advance] = []
        while not self._inbox.empty() or not (self._scheduler.has_work or advances):
            command = self._inbox.get()
            if command is None:
                return None
            if isinstance(command, frames.Abort):
                advances += self._abort(command.seq_no)
            else:
                self._scheduler.add(self._sequence(command))
        return advances

    def _sequence(self, command: frames.Add) -> Sequence:
        token_ids = blocks.from_bytes(command.token_ids)
        return Sequence(command.seq_no, token_ids, command.sampling, self._runner.end_token_ids)

    def _abort(self, seq_no: int) -> list[Advance]:
        advance = self._scheduler.abort(seq_no)
        if advance is None:
            return []
        if advance.sequence.lane is not None:
            self._runner.release(advance.sequence.lane)
        return [advance]

    def _begin(self, plan: StepPlan) -> None:
        """Prepares the lanes of new sequences, and says so before the step that computes their prompts."""
        for sequence in plan.started:
            assert sequence.lane is not None
            self._runner.begin(sequence.lane, sequence.sampling)
        if plan.started:
            started = [sequence.seq_no for sequence in plan.started]
            self._report(frames.StepReport(started, [], self._scheduler.load()))

    def _step(self, plan: StepPlan) -> list[Advance]:
        if not plan.parts:
            return []
        began = time.monotonic()
        try:
            sampled = self._runner.step(plan)
        except NoRoomError:
            return [self._give_way()]
        self._pace.observe(plan.num_tokens, time.monotonic() - began)
        advances = self._scheduler.commit(plan, sampled)
        for sequence, _, end in advances:
            if end is not None and sequence.lane is not None:
                self._runner.release(sequence.lane)
        return advances

    def _give_way(self) -> Advance:
        """Ends the youngest sequence, so that its neighbours can go on."""
        youngest = self._scheduler.youngest()
        self._log.error("no_kv_room", seq_no=youngest.seq_no, load=repr(self._scheduler))
        assert youngest.lane is not None
        self._runner.release(youngest.lane)
        return self._scheduler.end(youngest, End.NO_ROOM)

    def _hand_out(self, advances: list[Advance]) -> None:
        outputs = [frames.SequenceOutput(s.seq_no, token_id, end) for s, token_id, end in advances]
        self._report(frames.StepReport([], outputs, self._scheduler.load()))
        if not self._scheduler.has_work:
            self._scheduler.check_integrity()
