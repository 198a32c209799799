"""The scheduler plans decodes first and prompts in fair chunks, never above its budgets, and forgets nobody."""

import msgspec
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol import messages
from worker import contract
from worker.engine.blocks import BlockPool
from worker.engine.plan import Advance, StepPlan
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import End, Sequence

EOS, PLAIN = 0, 5


def scheduler(*, total_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(BlockPool(total_blocks, block_size), max_num_seqs)


def sequence(seq_no: int, num_prompt: int, max_tokens: int = 8, **sampling: object) -> Sequence:
    asked = contract.Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Sequence(seq_no, [1 + place % 9 for place in range(num_prompt)], asked, frozenset({EOS}))


def step(scheduler: Scheduler, budget: int = 1_000, token_id: int | End = PLAIN) -> list[Advance]:
    """Plans and commits; every part that samples gets `token_id`."""
    plan = scheduler.plan(budget)
    advances = scheduler.commit(plan, [token_id for part in plan.parts if part.samples])
    scheduler.check_integrity()
    return advances


def sizes(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Number, start and token count of each part."""
    return [(part.sequence.seq_no, part.start, part.num_tokens) for part in plan.parts]


def held(scheduler: Scheduler) -> messages.Load:
    """What a scheduler holds now, whatever it has generated so far."""
    return msgspec.structs.replace(scheduler.load(), generated_tokens=0)


def test_with_nothing_to_do_the_plan_is_empty() -> None:
    idle = scheduler()
    assert not idle.has_work
    assert idle.plan(100) == StepPlan((), ())


def test_a_prompt_is_computed_whole_where_the_budget_allows_and_samples_behind_its_end() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    plan = one.plan(10)
    assert sizes(plan) == [(1, 0, 10)]
    assert [started.seq_no for started in plan.started] == [1]
    assert plan.parts[0].samples
    assert plan.num_tokens == 10
    (advance,) = one.commit(plan, [PLAIN])
    assert (advance.sequence.seq_no, advance.token_id, advance.end) == (1, PLAIN, None)
    assert sizes(one.plan(10)) == [(1, 10, 1)]


def test_a_prompt_one_token_longer_than_the_budget_takes_two_steps_and_samples_in_the_second() -> None:
    one = scheduler()
    one.add(sequence(1, 12))
    plan = one.plan(11)
    assert sizes(plan) == [(1, 0, 11)]
    assert not plan.parts[0].samples
    assert one.commit(plan, []) == []
    plan = one.plan(11)
    assert sizes(plan) == [(1, 11, 1)]
    assert plan.started == ()
    assert plan.parts[0].samples


def test_decodes_come_before_prompts_and_do_not_share_their_budget() -> None:
    mixed = scheduler()
    mixed.add(sequence(1, 3))
    mixed.add(sequence(2, 3))
    step(mixed)
    mixed.add(sequence(3, 20))
    mixed.add(sequence(4, 20))
    assert sizes(mixed.plan(6)) == [(1, 3, 1), (2, 3, 1), (3, 0, 3), (4, 0, 3)]


def test_the_oldest_prompt_gets_half_of_what_is_left_and_the_last_one_the_rest() -> None:
    three = scheduler()
    for number in (1, 2, 3):
        three.add(sequence(number, 50))
    assert sizes(three.plan(16)) == [(1, 0, 8), (2, 0, 4), (3, 0, 4)]


def test_what_a_short_prompt_leaves_goes_to_those_behind_it() -> None:
    two = scheduler()
    two.add(sequence(1, 2))
    two.add(sequence(2, 50))
    assert sizes(two.plan(16)) == [(1, 0, 2), (2, 0, 14)]


def test_no_prompt_takes_the_whole_budget_while_another_waits() -> None:
    for budget in range(2, 40):
        two = scheduler()
        two.add(sequence(1, 100))
        two.add(sequence(2, 100))
        plan = two.plan(budget)
        assert [number for number, _, _ in sizes(plan)] == [1, 2], budget
        assert plan.num_tokens == budget


def test_a_budget_of_one_token_goes_to_the_oldest_prompt() -> None:
    two = scheduler()
    two.add(sequence(1, 5))
    two.add(sequence(2, 5))
    assert sizes(two.plan(1)) == [(1, 0, 1)]


def test_sequences_start_in_the_order_of_their_arrival_while_there_are_lanes() -> None:
    busy = scheduler(max_num_seqs=2)
    for number in (1, 2, 3, 4):
        busy.add(sequence(number, 3, max_tokens=2))
    plan = busy.plan(100)
    assert [started.seq_no for started in plan.started] == [1, 2]
    assert sorted(started.lane for started in plan.started if started.lane is not None) == [0, 1]
    assert busy.load().waiting == 2
    busy.commit(plan, [EOS, PLAIN])
    assert [started.seq_no for started in busy.plan(100).started] == [3]


def test_a_large_sequence_at_the_head_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    full = scheduler(total_blocks=10, block_size=4)
    full.add(sequence(1, 4, max_tokens=4))
    step(full)
    full.add(sequence(2, 36, max_tokens=4))
    full.add(sequence(3, 4, max_tokens=4))
    for _ in range(2):
        assert full.plan(100).started == ()
        step(full)
    assert step(full)[0].end is End.LENGTH
    assert [started.seq_no for started in full.plan(100).started] == [2]


def test_a_sequence_starts_when_exactly_what_it_may_ever_need_is_free_and_not_a_token_sooner() -> None:
    for max_tokens, starts in ((4, True), (5, False)):
        exact = scheduler(total_blocks=4, block_size=4)
        exact.add(sequence(1, 4, max_tokens=4))
        step(exact)
        exact.add(sequence(2, 4, max_tokens=max_tokens))
        assert bool(exact.plan(100).started) is starts


def test_a_sequence_that_no_empty_pool_could_hold_is_not_taken() -> None:
    small = scheduler(total_blocks=4, block_size=4)
    small.add(sequence(1, 8, max_tokens=8))
    with pytest.raises(AssertionError):
        small.add(sequence(2, 8, max_tokens=9))
    assert small.load().waiting == 1


def test_a_waiting_sequence_is_aborted_without_ever_having_had_a_lane() -> None:
    one = scheduler(max_num_seqs=1)
    one.add(sequence(1, 3))
    one.add(sequence(2, 3))
    step(one)
    advance = one.abort(2)
    assert advance is not None
    assert (advance.sequence.seq_no, advance.sequence.lane, advance.token_id, advance.end) == (
        2,
        None,
        None,
        End.ABORTED,
    )
    assert one.load().waiting == 0
    one.check_integrity()


def test_an_aborted_sequence_names_its_lane_and_leaves_it_and_its_blocks_to_the_next() -> None:
    one = scheduler(total_blocks=4, block_size=4, max_num_seqs=1)
    one.add(sequence(1, 8, max_tokens=8))
    step(one)
    advance = one.abort(1)
    assert advance is not None
    assert (advance.sequence.lane, advance.end) == (0, End.ABORTED)
    assert held(one) == messages.Load(free_blocks=4)
    one.add(sequence(2, 8, max_tokens=8))
    assert [started.lane for started in one.plan(100).started] == [0]


def test_aborting_what_is_unknown_or_has_ended_does_nothing() -> None:
    one = scheduler()
    one.add(sequence(1, 3, max_tokens=1))
    assert one.abort(7) is None
    assert step(one)[0].end is End.LENGTH
    assert one.abort(1) is None
    one.check_integrity()


def test_an_end_without_a_token_ends_only_its_own_sequence() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3))
    plan = two.plan(100)
    advances = two.commit(plan, [End.BAD_LOGITS, PLAIN])
    assert [(a.sequence.seq_no, a.token_id, a.end) for a in advances] == [(1, None, End.BAD_LOGITS), (2, PLAIN, None)]
    assert sizes(two.plan(100)) == [(2, 3, 1)]


def test_a_sequence_leaves_with_its_stop_token_and_with_its_last_token() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3, max_tokens=1, ignore_eos=True))
    advances = step(two, token_id=EOS)
    assert [(a.sequence.seq_no, a.token_id, a.end) for a in advances] == [
        (1, EOS, End.STOP_TOKEN),
        (2, EOS, End.LENGTH),
    ]
    assert not two.has_work


def test_the_youngest_is_the_one_that_started_last() -> None:
    three = scheduler()
    for number in (1, 2, 3):
        three.add(sequence(number, 3))
    step(three)
    assert three.youngest().seq_no == 3
    assert three.end(three.youngest(), End.NO_ROOM).end is End.NO_ROOM
    assert three.youngest().seq_no == 2


def test_results_must_match_the_parts_that_sample() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    with pytest.raises(AssertionError):
        one.commit(one.plan(4), [PLAIN])


def test_the_load_counts_prompt_tokens_that_are_not_computed_yet_and_no_decodes() -> None:
    loaded = scheduler(total_blocks=20, block_size=4, max_num_seqs=2)
    loaded.add(sequence(1, 3, max_tokens=5))
    step(loaded)
    loaded.add(sequence(2, 10, max_tokens=2))
    loaded.add(sequence(3, 7, max_tokens=5))
    step(loaded, budget=4)
    assert held(loaded) == messages.Load(
        running=2, waiting=1, queued_prefill_tokens=6 + 7, used_blocks=2, free_blocks=15
    )


class SchedulerHistory(RuleBasedStateMachine):
    """Random lives of many sequences. The model keeps every sequence's tokens and how many of them were computed."""

    @initialize(total_blocks=st.integers(4, 24), block_size=st.integers(1, 5), max_num_seqs=st.integers(1, 4))
    def make(self, total_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.pool = BlockPool(total_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs)
        self.max_num_seqs = max_num_seqs
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        self.arrived: list[int] = []
        self.started: list[int] = []
        self.ended: dict[int, End] = {}

    @rule(
        num_prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 8),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
    )
    def add(self, num_prompt: int, max_tokens: int, min_tokens: int, ignore_eos: bool) -> None:
        assume(self.pool.can_ever_promise(num_prompt + max_tokens))
        seq_no = len(self.arrived) + 1
        new = sequence(seq_no, num_prompt, max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos)
        self.scheduler.add(new)
        self.arrived.append(seq_no)
        self.tokens[seq_no], self.computed[seq_no] = list(new.token_ids), 0
        self.needs[seq_no] = num_prompt + max_tokens

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_no = data.draw(st.integers(0, len(self.arrived) + 1))
        advance = self.scheduler.abort(seq_no)
        alive = 0 < seq_no <= len(self.arrived) and seq_no not in self.ended
        assert (advance is not None) == alive
        if advance is not None:
            assert (advance.sequence.seq_no, advance.token_id) == (seq_no, None)
            self.note_end(seq_no, advance.end)

    @rule(budget=st.integers(1, 24), data=st.data())
    def step(self, budget: int, data: st.DataObject) -> None:
        plan = self.scheduler.plan(budget)
        self.scheduler.check_integrity()
        self.check_started(plan)
        self.check_parts(plan, budget)
        results = data.draw(
            st.lists(
                st.sampled_from([PLAIN, PLAIN, PLAIN, EOS, End.BAD_LOGITS]),
                min_size=sum(part.samples for part in plan.parts),
                max_size=sum(part.samples for part in plan.parts),
            )
        )
        sampling = [part.sequence.seq_no for part in plan.parts if part.samples]
        advances = self.scheduler.commit(plan, results)
        assert [advance.sequence.seq_no for advance in advances] == sampling
        for advance, result in zip(advances, results, strict=True):
            self.check_advance(advance, result)

    @precondition(lambda self: self.arrived)
    @rule(budget=st.integers(1, 24))
    def give_way(self, budget: int) -> None:
        """A step that found no room: the plan is dropped and the youngest has to go."""
        plan = self.scheduler.plan(budget)
        self.check_started(plan)
        if not plan.parts:
            return
        advance = self.scheduler.end(self.scheduler.youngest(), End.NO_ROOM)
        alive = [seq_no for seq_no in self.started if seq_no not in self.ended]
        assert advance.sequence.seq_no == alive[-1]
        self.note_end(advance.sequence.seq_no, advance.end)

    def check_started(self, plan: StepPlan) -> None:
        numbers = [started.seq_no for started in plan.started]
        waiting = [number for number in self.arrived if number not in self.ended and number not in self.started]
        assert numbers == waiting[: len(numbers)], "someone was overtaken"
        self.started += numbers
        lanes = [started.lane for started in plan.started]
        assert len(set(lanes)) == len(lanes)
        held = [number for number in self.started if number not in self.ended]
        left = waiting[len(numbers) :]
        if left and len(held) < self.max_num_seqs:
            assert self.blocks(left[0]) > self.pool.free_blocks, "someone waits who could run"

    def check_parts(self, plan: StepPlan, budget: int) -> None:
        decodes = [part for part in plan.parts if self.left(part.sequence.seq_no) == 1]
        prompts = [part for part in plan.parts if self.left(part.sequence.seq_no) > 1]
        assert list(plan.parts) == decodes + prompts
        assert sum(part.num_tokens for part in prompts) <= budget
        alive = [number for number in self.started if number not in self.ended]
        assert [part.sequence.seq_no for part in decodes] == [number for number in alive if self.left(number) == 1]
        waiting = [number for number in alive if self.left(number) > 1]
        assert [part.sequence.seq_no for part in prompts] == waiting[: len(prompts)]
        assert len(prompts) == len(waiting) or sum(part.num_tokens for part in prompts) == budget
        if len(waiting) > 1 and budget > 1:
            assert len(prompts) > 1, "one prompt took it all"
        for part in plan.parts:
            number = part.sequence.seq_no
            assert part.num_tokens >= 1
            assert part.start == self.computed[number], "computed twice, or not at all"
            assert part.token_ids == self.tokens[number][part.start : part.start + part.num_tokens]
            self.computed[number] += part.num_tokens
            assert part.samples == (self.computed[number] == len(self.tokens[number]))

    def check_advance(self, advance: Advance, result: int | End) -> None:
        number = advance.sequence.seq_no
        if isinstance(result, End):
            assert (advance.token_id, advance.end) == (None, result)
        else:
            assert advance.token_id == result
            self.tokens[number].append(result)
        if advance.end is not None:
            self.note_end(number, advance.end)

    def note_end(self, seq_no: int, end: End | None) -> None:
        assert end is not None
        assert seq_no not in self.ended, "it ended twice"
        self.ended[seq_no] = end

    def left(self, seq_no: int) -> int:
        return len(self.tokens[seq_no]) - self.computed[seq_no]

    def blocks(self, seq_no: int) -> int:
        return len(range(0, self.needs[seq_no], self.pool.block_size))

    @invariant()
    def holds_together(self) -> None:
        self.scheduler.check_integrity()
        alive = [number for number in self.started if number not in self.ended]
        promised = sum(self.blocks(number) for number in alive)
        assert promised <= self.pool.total_blocks
        assert self.pool.free_blocks == self.pool.total_blocks - promised
        load = self.scheduler.load()
        assert load.running == len(alive) <= self.max_num_seqs
        assert load.running + load.waiting == len(self.arrived) - len(self.ended)
        assert self.scheduler.has_work == (load.running + load.waiting > 0)
        assert load.used_blocks <= promised

    def teardown(self) -> None:
        most = sum(self.needs.values()) + len(self.arrived)
        for _ in range(most):
            plan = self.scheduler.plan(3)
            self.check_started(plan)
            self.check_parts(plan, 3)
            for advance in self.scheduler.commit(plan, [PLAIN for part in plan.parts if part.samples]):
                self.check_advance(advance, PLAIN)
            self.holds_together()
        assert sorted(self.ended) == self.arrived, "somebody never ended"
        assert held(self.scheduler) == messages.Load(free_blocks=self.pool.total_blocks)
        for number, end in self.ended.items():
            if end is End.LENGTH:
                assert len(self.tokens[number]) == self.needs[number]


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
