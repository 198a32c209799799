"""Scheduler and checkpoints go through thousands of random histories, on a runner that notices wrong states."""

import os
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.arithmetic import END_TOKEN, ArithmeticRunner, make_config
from tests.support.stateful import STATE_BYTES, TOKEN_BYTES, StatefulRunner
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Truncate
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel, Domain
from tokenbus.worker.engine.kv.retention import CacheHint, RetentionLimits
from tokenbus.worker.engine.scheduling.plan import StepPlan, StepResult, Undone
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

BLOCK = 4
DOMAINS = (Domain("a"), Domain("a"), Domain("b"), Domain("a", "salt"), None)
HISTORIES = int(os.environ.get("TOKENBUS_HISTORIES", "30")) * 5


class CheckpointHistory(RuleBasedStateMachine):
    """A scheduler whose plans are executed at once."""

    @initialize(
        total=st.integers(8, 30),
        num_states=st.sampled_from([0, 1, 2, 5, 50]),
        has_kv=st.booleans(),
        expected=st.sampled_from([0, 1, 3]),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        least=st.sampled_from([0, 0, 9, 24, 999]),
    )
    def begin(self, total: int, num_states: int, has_kv: bool, expected: int, share: float, least: int) -> None:
        config = make_config(max_num_seqs=4, kv_block_size=BLOCK, total_kv_blocks=total, max_num_batched_tokens=99)
        self.budget = num_states * (STATE_BYTES + 20 * TOKEN_BYTES)
        sizes = CheckpointSizes(self.budget, STATE_BYTES, TOKEN_BYTES if has_kv else 0)
        self.total, self.config, self.sizes, self.has_kv, self.expected = total, config, sizes, has_kv, expected
        self.limits, self.least = RetentionLimits(share, 5.0), least
        self.labels: dict[int, BlockLabel] = {}
        self.start_engine({}, {})
        self.open: dict[int, Sequence] = {}
        self.told: dict[int, list[int]] = {}
        self.asked: list[Sequence] = []
        self.number = 0

    def start_engine(self, kv: dict[int, dict[int, int]], states: dict[int, list[int]]) -> None:
        """Makes an engine, which finds these copies of the one before it, as far as they were labelled."""
        self.runner = StatefulRunner(self.config, 4, has_kv=self.has_kv)
        self.pool = BlockPool(
            self.total, BLOCK, 4, checkpoint_sizes=self.sizes, limits=self.limits, min_prefix_tokens=self.least
        )
        assert self.pool.checkpoints is not None
        self.checkpoints = self.pool.checkpoints
        self.scheduler = Scheduler(self.pool, 4, priority_s=1.0, expected_tokens=self.expected)
        labels, self.labels = self.labels, {}
        for number, (copy_id, label) in enumerate(sorted(labels.items()), start=1):
            self.labels[number] = label
            if label.is_state:
                self.runner._saved[number] = states[copy_id]
            else:
                self.runner._kv[number] = kv[copy_id]
        rejected = self.pool.prefixes.recover(list(self.labels.items()))
        for number in rejected:
            del self.labels[number]
            self.runner.apply([Discard(number)])
        self.announced = set[int]()

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The engine dies, somewhere among the changes of its next step. Another one continues all sequences."""
        plan = self.scheduler.schedule(40, now=0.3 * self.number)
        self.apply(plan.kv_ops[: data.draw(st.integers(0, len(plan.kv_ops)))])
        opened, self.open = self.open, {}
        self.start_engine(self.runner._kv, self.runner._saved)
        for number, sequence in opened.items():
            self.open[number] = again = Sequence(
                number,
                sequence.token_ids,
                sequence.sampling,
                frozenset({END_TOKEN}),
                domain=sequence.domain,
                priority=sequence.priority,
                arrived_at=sequence.arrived_at,
                num_resumed=sequence.num_sampled,
                hint=sequence.hint,
            )
            self.scheduler.add(again)

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        self.runner.apply(kv_ops)
        for op in kv_ops:
            if isinstance(op, Discard):
                self.labels.pop(op.copy_id, None)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 60),
        fork=st.sampled_from([0, 9, 22, 40, 60]),
        max_tokens=st.integers(1, 30),
        domain=st.sampled_from(DOMAINS),
        priority=st.integers(-2, 2),
        isolated=st.sampled_from([False, False, False, True]),
        session=st.sampled_from([None, None, "1", "2"]),
        ttl_s=st.sampled_from([None, None, 0.0, 1.0, 99.0]),
    )
    def ask(
        self,
        family: int,
        length: int,
        fork: int,
        max_tokens: int,
        domain: Domain | None,
        priority: int,
        isolated: bool,
        session: str | None,
        ttl_s: float | None,
    ) -> None:
        """Adds a sequence with a prompt of one of few families, which fork somewhere."""
        prompt = [1 + (family + place) % 7 for place in range(min(length, fork))]
        prompt += [50 + self.number % 3] * (length - len(prompt))
        hint = CacheHint(None if session is None or domain is None else (domain.tenant, session), ttl_s)
        self.add(prompt, max_tokens, domain, priority, isolated=isolated, hint=hint)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), length=st.integers(1, 20), max_tokens=st.integers(1, 30))
    def go_on(self, which: int, length: int, max_tokens: int) -> None:
        """Adds the next turn of a conversation."""
        before = self.asked[which % len(self.asked)]
        prompt = [*before.token_ids, *(60 + place % 5 for place in range(length))]
        self.add(prompt, max_tokens, before.domain, 0, isolated=False, hint=before.hint)

    @rule(tenant=st.sampled_from(["a", "b"]), session=st.sampled_from(["1", "2"]), ttl_s=st.sampled_from([0.0, 2.0]))
    def retain(self, tenant: str, session: str, ttl_s: float) -> None:
        """A client keeps what a session has left, or says that it has ended: nothing goes at once."""
        before = len(self.checkpoints), self.checkpoints.used_bytes
        self.pool.prefixes.retention.expire(0.3 * self.number)
        self.pool.retain_session((tenant, session), ttl_s)
        assert (len(self.checkpoints), self.checkpoints.used_bytes) == before

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        domain: Domain | None,
        priority: int,
        *,
        isolated: bool,
        hint: CacheHint,
    ) -> None:
        self.number += 1
        sequence = Sequence(
            self.number,
            array("I", prompt),
            engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True),
            frozenset({END_TOKEN}),
            domain=domain,
            priority=priority,
            arrived_at=0.3 * self.number,
            isolated=isolated,
            hint=hint,
        )
        if self.pool.can_ever_allocate(sequence.max_num_tokens):
            self.open[self.number] = sequence
            self.told[self.number] = []
            self.asked.append(sequence)
            self.scheduler.add(sequence)

    @rule(budget=st.integers(1, 60), times=st.integers(1, 8))
    def step(self, budget: int, times: int) -> None:
        for _ in range(times):
            self.one_step(budget)

    @rule(budget=st.integers(1, 60), data=st.data())
    def poison(self, budget: int, data: st.DataObject) -> None:
        """A step computes no numbers for some of its shares, whose lanes are empty then."""
        plan = self.schedule(budget)
        numbers = [part.sequence.seq_no for part in plan.scheduled]
        poisoned = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
        good = [part for part in plan.scheduled if part.sequence.seq_no not in poisoned]
        self.runner.apply([Truncate(part.lane) for part in plan.scheduled if part not in good])
        done = iter(self.runner.step(plan._replace(scheduled=tuple(good))) if good else [])
        outcomes = [Undone.LOST if number in poisoned else next(done) for number in numbers]
        self.take(self.scheduler.update(plan, outcomes))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        result = self.scheduler.abort(sorted(self.open)[which % len(self.open)])
        assert result is not None
        self.take([result])

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.apply(self.pool.cache.ops.take())
        assert not len(self.checkpoints)
        assert not self.checkpoints.used_bytes

    @precondition(lambda self: self.open)
    @rule(budget=st.integers(1, 60))
    def fail_for_memory(self, budget: int) -> None:
        """The device has too little room for a step, of which nothing is computed then."""
        plan = self.schedule(budget)
        if plan.scheduled:
            result = self.scheduler.reclaim_memory()
            self.take([] if result is None else [result])

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.scheduler.check_integrity()
        removed, stored = self.pool.prefixes.take_events()
        assert len(set(removed)) == len(removed)
        assert set(removed) <= self.announced
        self.announced -= set(removed)
        assert not self.announced & {one.hash for one in stored}, "stored twice"
        self.announced |= {one.hash for one in stored}
        kept = [one for one in self.checkpoints.all() if one.has_state]
        assert self.announced == {one.hash for one in kept if one.end % BLOCK == 0}
        assert all(one.end >= self.least for one in kept)
        assert len(self.announced) <= self.pool.cache.total_blocks

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(3_000):
            if not self.scheduler.has_work:
                break
            self.one_step(40)
            self.everything_adds_up()
        assert not self.open, f"never ended: {self.open}"
        assert (self.pool.cache.used_blocks, self.pool.cache.free_blocks) == (0, self.pool.cache.total_blocks)
        self.clear()
        self.everything_adds_up()
        assert not self.announced
        assert self.runner.is_empty()

    def schedule(self, budget: int) -> StepPlan:
        plan = self.scheduler.schedule(budget, now=0.3 * self.number)
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.apply(plan.kv_ops)
        self.labels |= dict(plan.labels)
        assert self.runner.copied_bytes <= self.budget
        return plan

    def one_step(self, budget: int) -> None:
        plan = self.schedule(budget)
        decodes = [part for part in plan.scheduled if part.num_tokens == 1]
        assert sum(part.num_tokens for part in plan.scheduled) <= budget + len(decodes)
        assert plan.scheduled or not self.scheduler.load().running
        if plan.scheduled:
            self.take(self.scheduler.update(plan, self.runner.step(plan)))

    def take(self, results: list[StepResult]) -> None:
        for sequence, sampled, end in results:
            if sampled is not None:
                self.told[sequence.seq_no].append(sampled.token_id)
            if end is not None:
                del self.open[sequence.seq_no]
                self.runner.remove_sequence(sequence.seq_no)
            if end is EngineFinishReason.LENGTH:
                self.check_answer(sequence)

    def check_answer(self, sequence: Sequence) -> None:
        """Asserts that a sequence got the tokens that it gets alone."""
        alone = ArithmeticRunner(make_config(total_kv_blocks=99))
        scheduler = Scheduler(BlockPool(99, 16, 1, can_share=False), 1)
        copy = Sequence(1, sequence.token_ids[: sequence.num_prompt], sequence.sampling, frozenset({END_TOKEN}))
        scheduler.add(copy)
        alone.add_sequence(1, sequence.sampling)
        while scheduler.has_work:
            plan = scheduler.schedule(60)
            alone.apply(plan.kv_ops)
            scheduler.update(plan, alone.step(plan))
        assert list(copy.token_ids[copy.num_prompt :]) == self.told[sequence.seq_no]


TestCheckpointHistories: Callable[[], None] = CheckpointHistory.TestCase
TestCheckpointHistories.settings = settings(  # type: ignore[attr-defined]
    max_examples=HISTORIES, stateful_step_count=30, deadline=None
)
