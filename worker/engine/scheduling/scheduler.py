"""The scheduler decides what each step computes: first the new tokens of every decoding sequence, then prompts.

Prompts are computed in chunks under a token budget, so that a step stays short for those that decode. Sequences start,
get their share of the budget and keep their memory in the order of their priority keys: a priority of n counts like
arriving n times `priority_s` seconds later. The order of two sequences never changes, and a waiting one can be
overtaken only for a bounded time (decision 0021). While there is none, expected turns are computed (next_turns.py).

A sequence starts when there is room for what it and the running ones are expected to use. If that was too little, the
last in the order is preempted: it waits again at its place in the order, and its blocks go to host memory like all
cached ones. Each time the expectation for it, and for all those it starts beside, doubles, up to their `max_tokens`.
Then no sequence can outgrow its reservation any more, so that only later arrivals with a higher priority can preempt it
again:

    preemptions       0        1        2        3        4
    reserved for all  100      200      400      800      1,000 = max_tokens

Preemption does not wait until the memory is full: if answers turn out so much longer that the running ones are expected
to use more than twice the memory, the last are preempted at once. Many sequences in a full memory are slower than a few
with room, and those preempted late have filled memory for nothing.

If replicas lend each other lanes (lanes.py), each step begins with the lanes that this one may hold. If there are fewer
than before, idle lanes are emptied first, then the last sequences are preempted.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import messages
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.counters import Counters, SchedulerCounts
from tokenbus.worker.engine.scheduling.expectation import Expectation
from tokenbus.worker.engine.scheduling.lanes import BorrowedLanes, LaneShare
from tokenbus.worker.engine.scheduling.next_turns import TurnsAhead
from tokenbus.worker.engine.scheduling.plan import (
    Outcome,
    SampledToken,
    ScheduledTokens,
    StepPlan,
    StepResult,
    Undone,
)
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.step_budget import distinct_prompts
from tokenbus.worker.engine.scheduling.suspects import Suspects, Verdict, acquit


class Scheduler:
    """All sequences of one engine: waiting ones, and running ones, with a lane and blocks.

    One step of priority is worth `priority_s` seconds of waiting. At most `max_cached_blocks` unused blocks stay on the
    device. A step has at most `max_step_tokens` tokens. An answer is expected to have `expected_tokens`; 0 means that
    this is learned from finished ones. With a `lane_share` it holds only the lanes lent to it. Where the device has
    `row_tiles`, a prompt's share is a whole tile if less would take as long."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        *,
        max_step_tokens: int = 1 << 30,
        priority_s: float = 1.0,
        max_cached_blocks: int | None = None,
        expected_tokens: int = 0,
        lane_share: LaneShare | None = None,
        row_tiles: RowTiles | None = None,
    ) -> None:
        assert 0 < max_num_seqs < max_step_tokens, (max_num_seqs, max_step_tokens)
        self._pool = pool
        self._cache = pool.cache
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._priority_s = priority_s
        self._max_cached_blocks = self._cache.total_blocks if max_cached_blocks is None else max_cached_blocks
        self._expectation = Expectation(expected_tokens, self._cache.num_blocks)
        self._row_tiles = row_tiles
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """Both in the order of their priority keys."""
        self._counters = Counters()
        self.next_turns = TurnsAhead(pool)
        self._suspects = Suspects()
        self._preempted: list[Sequence] = []
        """Those preempted since the last plan."""
        self._under_pressure = False
        """The device had less room than the pool counts: no sequence is started until one has ended."""
        self.borrowed_lanes = None if lane_share is None else BorrowedLanes(lane_share, self._cache)

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    @property
    def has_work(self) -> bool:
        if self.borrowed_lanes is not None and not self._running and not self.next_turns.is_computing:
            return self.borrowed_lanes.has_changed or (bool(self._waiting) and not self.borrowed_lanes.are_awaited)
        return bool(self._running or self._waiting)

    @property
    def counts(self) -> SchedulerCounts:
        return self._counters.snapshot(self._pool, self.next_turns)

    @property
    def running(self) -> Listing[Sequence]:
        """Sequences with a lane, in the order of their priority keys."""
        return self._running

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, including waiting ones."""
        return [*self._running, *self._waiting]

    @property
    def num_decoding(self) -> int:
        """The number of sequences whose clients wait for their next token."""
        return sum(sequence.is_decoding for sequence in self._running)

    @property
    def isolated(self) -> Sequence | None:
        """The sequence that has the next steps to itself, because an engine died in a step with it."""
        return next((sequence for sequence in self._running if sequence.isolated), None)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, which must fit into an empty pool."""
        assert self._pool.can_ever_allocate(sequence.max_num_tokens), sequence
        if self.borrowed_lanes is not None:
            self.borrowed_lanes.are_awaited = False  # it wants one more
        self.next_turns.came(sequence)
        bisect.insort(self._waiting, sequence, key=self._priority_key)

    def abort(self, seq_no: int) -> StepResult | None:
        """Removes a sequence; returns None if there is none."""
        sequence = next((one for one in (*self._running, *self._waiting) if one.seq_no == seq_no), None)
        if sequence is None:
            return None
        if sequence in self._running:
            return self.finish(sequence, EngineFinishReason.ABORTED)
        self._waiting.remove(sequence)
        return StepResult(sequence, None, EngineFinishReason.ABORTED)

    def finish(self, sequence: Sequence, finish_reason: EngineFinishReason) -> StepResult:
        """Ends a running sequence; its computed blocks stay cached."""
        self._free(sequence)
        session, ttl_s = sequence.hint
        if session is not None and ttl_s == 0:
            self._pool.prefixes.end_session(session)
        if sequence.num_sampled:
            was_cut = finish_reason not in (EngineFinishReason.STOP_TOKEN, EngineFinishReason.ABORTED)
            self._expectation.record(sequence, was_cut=was_cut)
        self._under_pressure = False
        return StepResult(sequence, None, finish_reason)

    def schedule(
        self, prefill_tokens: int, transfer_blocks: int = 0, now: float = 0.0, *, ahead_tokens: int = 0
    ) -> StepPlan:
        """Plans the next step, with at most `prefill_tokens` tokens of prompts; if there is no sequence, with at most
        `ahead_tokens` of a turn that is expected.

        Before it, at most `transfer_blocks` blocks are copied to host memory, and as many back. `now` is the time, in
        seconds of one monotonic clock."""
        self._pool.prefixes.retention.expire(now)
        self._cache.host.set_limits(offloads=transfer_blocks, onloads=transfer_blocks)
        self._expectation.observe((*self._running, *self._waiting))
        self._preempt_excess()
        self._give_up_lanes()
        ahead = self.next_turns.schedule(0 if self._running or self._waiting else ahead_tokens)
        started = self._start_waiting()
        for sequence in self._running:
            if not sequence.is_decoding:
                before = sequence.num_computed
                reused = sequence.kv.reuse_prefix(sequence.token_ids, before, sequence.max_reused)
                sequence.reuse_prefix(reused)
                self._counters.restored_tokens += sequence.num_regained(before)
        isolated = self.isolated
        # A copy: a sequence that is preempted for another leaves the list of running ones.
        sequences = [one for one in (self._running if isolated is None else [isolated]) if one.is_ready]
        decodes = self._schedule_decodes(sequences)
        planned = {one.sequence.seq_no for one in decodes}
        left = self._max_step_tokens - sum(one.num_tokens for one in decodes)
        prompts = self._schedule_prompts(sequences, prefill_tokens, left, planned)
        self._cache.write_through()
        self._cache.trim(self._max_cached_blocks)
        preempted, self._preempted = self._preempted, []
        ops, labels = tuple(self._cache.ops.take()), tuple(self._pool.prefixes.take_labels())
        return StepPlan((*decodes, *prompts, *ahead), tuple(started), ops, tuple(preempted), labels)

    def update(self, plan: StepPlan, outcomes: Listing[Outcome]) -> list[StepResult]:
        """Records the outcome of each share of a step's plan; `outcomes` are in the same order."""
        results = []
        undone: dict[int, Undone] = {}
        for scheduled, outcome in zip(plan.scheduled, outcomes, strict=True):
            if scheduled.sequence.is_ahead:
                self.next_turns.update(scheduled, is_done=outcome is None)
                continue
            if isinstance(outcome, Undone):
                undone[scheduled.sequence.seq_no] = outcome
                continue
            sequence, samples = scheduled.sequence, scheduled.samples  # read before it gains a token
            assert samples == (outcome is not None), scheduled
            sequence.compute(scheduled.num_tokens)
            self._counters.computed_tokens += scheduled.num_tokens
            self._counters.recomputed_tokens += sequence.num_regained(scheduled.start)
            acquit(sequence)
            sequence.kv.cache_blocks(sequence.token_ids, sequence.num_computed)
            if outcome is not None:
                results.append(self._append(sequence, outcome))
        return results + self._redo(plan, undone) if undone else results

    def reclaim_memory(self) -> StepResult | None:
        """Makes room when the device has less than it reported: evicts the cache, then preempts the last sequence.

        A lone sequence that still has no room ends."""
        if self._cache.evictable_blocks:
            self._cache.clear()
            return None
        last = self._running[-1]
        if len(self._running) == 1:
            return self.finish(last, EngineFinishReason.INSUFFICIENT_MEMORY)
        self._preempt(last)
        self._under_pressure = True
        return None

    def load(self) -> messages.Load:
        """Returns its load, as reported to routers, except that sequences it has not started count neither as queued
        nor as expected: how much of their prompts is cached is not known here yet, and others are on their way."""
        cache, counters, running, waiting = self._cache, self._counters, self._running, self._waiting
        load = messages.Load(
            running=len(running),
            waiting=len(waiting),
            queued_prefill_tokens=sum(one.num_uncomputed for one in running if not one.is_decoding),
            used_blocks=cache.used_blocks - self.next_turns.used_blocks,
            cached_blocks=cache.evictable_blocks + self.next_turns.used_blocks,
            free_blocks=cache.free_blocks,
            expected_blocks=self._expected() + sum(self._expectation.blocks(one) for one in waiting if one.preemptions),
            expected_answer_tokens=self._expectation.answer_tokens,
            host_blocks=len(cache.host),
            kept_blocks=len(self._pool.prefixes.retention),
            fetched_blocks=cache.host.adopted_blocks,
            generated_tokens=counters.generated_tokens,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
        )
        return load if self.borrowed_lanes is None else self.borrowed_lanes.add_to(load, self._max_num_seqs)

    def check_counts(self) -> None:
        """Asserts the invariants that are cheap to check however much is cached."""
        assert len(self._running) <= self._max_num_seqs
        self._pool.check_counts()

    def check_integrity(self) -> None:
        """Asserts everything that must hold between any two calls; checks every cached block."""
        assert len(self._running) <= self._max_num_seqs
        for sequences in (self._running, self._waiting):
            assert sequences == sorted(sequences, key=self._priority_key)
        assert all(sequence.lane is None and not sequence.num_computed for sequence in self._waiting)
        for sequence in self._running:
            assert sequence.lane == sequence.kv.lane
            sequence.check_integrity()
        self._pool.check_integrity()
        numbers = [sequence.seq_no for sequence in (*self._running, *self._waiting)]
        assert len(numbers) == len(set(numbers)), numbers

    def _priority_key(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.arrived_at + sequence.priority * self._priority_s, sequence.seq_no

    def _free(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.free(sequence.kv, sequence.token_ids, sequence.num_computed)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's memory; it waits again, and later recomputes whatever is no longer cached."""
        self._free(sequence)
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.preempt()
        self._counters.preemptions += 1
        self._preempted.append(sequence)
        bisect.insort(self._waiting, sequence, key=self._priority_key)

    def _redo(self, plan: StepPlan, undone: Mapping[int, Undone]) -> list[StepResult]:
        """Arranges for what a step has left undone to be done later, or ends sequences for which that is impossible."""
        ended: list[StepResult | None] = []
        lacks_numbers = {number for number, why in undone.items() if why is not Undone.NO_ROOM}
        poisoned = [[one for one in batch if one.sequence.seq_no in lacks_numbers] for batch in plan.batches()]
        self._counters.poisoned_shares += len(lacks_numbers)
        for sequence, verdict in self._suspects.judge(poisoned):
            if verdict is not Verdict.COMPUTE_AGAIN or undone[sequence.seq_no] is Undone.LOST:
                ended.append(self._drop(sequence, verdict))
        if Undone.NO_ROOM in undone.values() and self._running:
            ended.append(self.reclaim_memory())
        return [result for result in ended if result is not None]

    def _drop(self, sequence: Sequence, verdict: Verdict) -> StepResult | None:
        """Takes a suspect's memory without caching any of it; the suspect waits again unless it is to end."""
        self._running.remove(sequence)
        self._pool.drop(sequence.kv, trusts_others=verdict is Verdict.COMPUTE_AGAIN)
        if verdict is Verdict.END:
            self._under_pressure = False
            return StepResult(sequence, None, EngineFinishReason.BAD_LOGITS)
        if verdict is Verdict.START_OVER:
            sequence.domain = None
        self._wait_again(sequence)
        return None

    def _preempt_excess(self) -> None:
        """If the running sequences are expected to use twice the memory, preempts the last until the rest are expected
        to fit.

        A smaller excess is no reason: estimates vary, and answers that run together do not all end at once."""
        total = self._cache.total_blocks
        if self.isolated is not None or self._expected() <= 2 * total:
            return
        while len(self._running) > 1 and self._expected() > total:
            self._preempt(self._running[-1])

    def _give_up_lanes(self) -> None:
        """Gives up lanes that are wanted elsewhere: idle ones, then those of the last sequences."""
        if self.borrowed_lanes is None:
            return
        can_start = not (self._under_pressure and self._running)
        wanted = min(len(self._waiting), self._max_num_seqs - len(self._running)) if can_start else 0
        excess = self.borrowed_lanes.request(len(self._running) + self.next_turns.is_computing, wanted)
        if excess:
            self.next_turns.set_aside()
        for _ in range(self.borrowed_lanes.empty_idle(excess)):
            self._preempt(next(one for one in reversed(self._running) if not one.isolated))
            self.borrowed_lanes.empty_preempted()
        self.borrowed_lanes.are_awaited = not self._running and not self._cache.has_lane

    def _expected(self) -> int:
        """Returns the blocks that running sequences use and are expected to use."""
        used = self._cache.used_blocks - self.next_turns.used_blocks
        return used + sum(self._expectation.reserved_blocks(one) for one in self._running)

    def _append(self, sequence: Sequence, outcome: SampledToken | EngineFinishReason) -> StepResult:
        if isinstance(outcome, EngineFinishReason):
            return self.finish(sequence, outcome)
        before = sequence.num_sampled
        finish_reason = sequence.append(outcome.token_ids)
        added = sequence.num_sampled - before
        self._counters.generated_tokens += added
        if not before:
            self._counters.prompt_tokens += sequence.num_prompt
            self._counters.cached_tokens += sequence.num_cached
            self.next_turns.count_used(sequence)
        if finish_reason is not None:
            self.finish(sequence, finish_reason)
        return StepResult(sequence, outcome._replace(followers=outcome.followers[: added - 1]), finish_reason)

    def _start_waiting(self) -> list[Sequence]:
        """Starts waiting sequences while there are lanes and room; none overtakes a large one that must wait.

        Returns those that start for the first time."""
        started: list[Sequence] = []
        if self._under_pressure and self._running:  # it would only be preempted again
            return started
        while self._waiting and len(self._running) < self._max_num_seqs:
            first = self._waiting[0]
            if not self._cache.has_lane or not self._has_room_for(first):
                break
            del self._waiting[0]
            is_new = not (first.preemptions or first.num_sampled)
            first.start(self._pool.allocate(first.domain, is_new=is_new, hint=first.hint))
            bisect.insort(self._running, first, key=self._priority_key)
            if not first.preemptions:
                started.append(first)
        return started

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether a sequence has room to start: the more often it was preempted, the more is reserved for all."""
        doublings = sequence.preemptions
        reserved = sum(self._expectation.reserved_blocks(one, doublings) for one in self._running)
        expected = self._expectation.tokens(sequence, doublings)
        return self._pool.can_allocate(sequence.domain, sequence.token_ids, expected, reserved)

    def _schedule_decodes(self, sequences: list[Sequence]) -> list[ScheduledTokens]:
        """Schedules all new tokens of each sequence, as long as the step has room for one token of each sequence after
        it."""
        scheduled: list[ScheduledTokens] = []
        planned: set[int] = set()
        left = self._max_step_tokens
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        for behind, sequence in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):
            if sequence.lane is None:  # preempted for one before it
                continue
            count = min(sequence.num_uncomputed, left - behind)
            if self._make_room(sequence, sequence.num_computed + count, planned):
                planned.add(sequence.seq_no)
                scheduled.append(ScheduledTokens(sequence, sequence.num_computed, count))
                left -= count
        return scheduled

    def _schedule_prompts(
        self, sequences: list[Sequence], budget: int, most: int, planned: set[int]
    ) -> list[ScheduledTokens]:
        """Divides the budget: a prompt that can be finished is; a longer one gets half of what is left while others
        wait after it, and all of it if it is the last. A tile that would only be padded is filled up beyond the budget,
        but the step has at most `most` tokens of prompts."""
        scheduled: list[ScheduledTokens] = []
        waiting = self._waiting[: self._max_num_seqs] if self._pool.checkpoints is not None else ()
        prompts = distinct_prompts(sequences, waiting)
        for behind, sequence in zip(range(len(prompts) - 1, -1, -1), prompts, strict=True):
            budget = min(budget, most)
            if budget <= 0:
                break
            if sequence.lane is None:  # preempted for one before it
                continue
            count = sequence.num_until_stop
            if count > budget:
                count = -(-budget // 2) if behind else budget  # rounded up, so that a budget of 1 is used
                count = min(self._fill_tile(sequence, count), most)
            if self._make_room(sequence, sequence.num_computed + count, planned):
                planned.add(sequence.seq_no)
                scheduled.append(ScheduledTokens(sequence, sequence.num_computed, count))
                budget -= count
                most -= count
        return scheduled

    def _fill_tile(self, sequence: Sequence, count: int) -> int:
        """Returns how many tokens of a prompt to compute rather than `count`, whose tile would only be padded."""
        tiles = self._row_tiles
        if tiles is None or not tiles.pads(count, sequence.num_computed + count):
            return count
        return min(tiles.rows, sequence.num_until_stop)

    def _make_room(self, sequence: Sequence, num_tokens: int, planned: set[int]) -> bool:
        """Gives a sequence blocks for `num_tokens`, preempting later ones if there are too few.

        An isolated one takes room from all others, since none of them can progress until it has a token."""
        while not sequence.kv.allocate_blocks(num_tokens):
            others = [one for one in self._running if one is not sequence] if sequence.isolated else self._running
            last = others[-1]
            # Sequences already planned keep their memory; and the last one can only wait.
            if last is sequence or last.seq_no in planned:
                return False
            self._preempt(last)
        return True
