"""The scheduler plans decodes first and prompts in fair chunks, never above its budgets, and forgets nobody."""

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import ArithmeticRunner, make_config
from tokenbus.protocol.wire import messages
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.ops import Offload, Onload, Share, Truncate
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan, StepResult
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS, PLAIN = 0, 5


def scheduler(
    *,
    total_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    overcommit: float = 1.0,
    priority_s: float = 1.0,
) -> Scheduler:
    pool = BlockPool(total_blocks, block_size, max_num_seqs, overcommit=overcommit)
    return Scheduler(pool, max_num_seqs, priority_s=priority_s)


def sequence(
    seq_no: int,
    num_prompt: int,
    max_tokens: int = 8,
    *,
    priority: int = 0,
    arrived_at: float = 0.0,
    isolated: bool = False,
    **sampling: object,
) -> Sequence:
    asked = contract.Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    token_ids = array("I", [1 + place % 9 for place in range(num_prompt)])
    return Sequence(
        seq_no, token_ids, asked, frozenset({EOS}), priority=priority, arrived_at=arrived_at, isolated=isolated
    )


def results(plan: StepPlan, *token_ids: int | EngineFinishReason) -> list[SampledToken | EngineFinishReason]:
    """One for each part that samples; PLAIN where nothing is said."""
    count = sum(part.samples for part in plan.scheduled)
    said = [*token_ids, *[PLAIN] * (count - len(token_ids))]
    return [one if isinstance(one, EngineFinishReason) else SampledToken(one) for one in said]


def step(scheduler: Scheduler, budget: int = 1_000, token_id: int = PLAIN) -> list[StepResult]:
    """Plans and commits; every part that samples gets `token_id`."""
    plan = scheduler.schedule(budget)
    scheduler.check_integrity()
    advances = scheduler.update(plan, results(plan, *[token_id for part in plan.scheduled if part.samples]))
    scheduler.check_integrity()
    return advances


def token_of(advance: StepResult) -> int | None:
    return None if advance.sampled is None else advance.sampled.token_id


def started(plan: StepPlan) -> list[int]:
    return [sequence.seq_no for sequence in plan.started]


def sizes(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Number, start and token count of each part."""
    return [(part.sequence.seq_no, part.start, part.num_tokens) for part in plan.scheduled]


def held(scheduler: Scheduler) -> messages.Load:
    """What a scheduler holds now, whatever it has generated so far."""
    counts = {"generated_tokens": 0, "computed_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
    return msgspec.structs.replace(scheduler.load(), **counts)


def test_with_nothing_to_do_the_plan_is_empty() -> None:
    idle = scheduler()
    assert not idle.has_work
    assert idle.schedule(100) == StepPlan((), (), ())


def test_a_prompt_is_computed_whole_where_the_budget_allows_and_samples_behind_its_end() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    plan = one.schedule(10)
    assert sizes(plan) == [(1, 0, 10)]
    assert started(plan) == [1]
    assert plan.scheduled[0].samples
    assert plan.num_tokens == 10
    (advance,) = one.update(plan, results(plan))
    assert (advance.sequence.seq_no, token_of(advance), advance.finish_reason) == (1, PLAIN, None)
    assert sizes(one.schedule(10)) == [(1, 10, 1)]


def test_a_prompt_one_token_longer_than_the_budget_takes_two_steps_and_samples_in_the_second() -> None:
    one = scheduler()
    one.add(sequence(1, 12))
    plan = one.schedule(11)
    assert sizes(plan) == [(1, 0, 11)]
    assert not plan.scheduled[0].samples
    assert one.update(plan, []) == []
    plan = one.schedule(11)
    assert sizes(plan) == [(1, 11, 1)]
    assert plan.started == ()
    assert plan.scheduled[0].samples


def test_decodes_come_before_prompts_and_do_not_share_their_budget() -> None:
    mixed = scheduler()
    mixed.add(sequence(1, 3))
    mixed.add(sequence(2, 3))
    step(mixed)
    mixed.add(sequence(3, 20))
    mixed.add(sequence(4, 20))
    assert sizes(mixed.schedule(6)) == [(1, 3, 1), (2, 3, 1), (3, 0, 3), (4, 0, 3)]


def test_the_oldest_prompt_gets_half_of_what_is_left_and_the_last_one_the_rest() -> None:
    three = scheduler()
    for number in (1, 2, 3):
        three.add(sequence(number, 50))
    assert sizes(three.schedule(16)) == [(1, 0, 8), (2, 0, 4), (3, 0, 4)]


def test_what_a_short_prompt_leaves_goes_to_those_behind_it() -> None:
    two = scheduler()
    two.add(sequence(1, 2))
    two.add(sequence(2, 50))
    assert sizes(two.schedule(16)) == [(1, 0, 2), (2, 0, 14)]


def test_no_prompt_takes_the_whole_budget_while_another_waits() -> None:
    for budget in range(2, 40):
        two = scheduler()
        two.add(sequence(1, 100))
        two.add(sequence(2, 100))
        plan = two.schedule(budget)
        assert [number for number, _, _ in sizes(plan)] == [1, 2], budget
        assert plan.num_tokens == budget


def test_a_budget_of_one_token_goes_to_the_oldest_prompt() -> None:
    two = scheduler()
    two.add(sequence(1, 5))
    two.add(sequence(2, 5))
    assert sizes(two.schedule(1)) == [(1, 0, 1)]


def test_sequences_start_in_the_order_of_their_arrival_while_there_are_lanes() -> None:
    busy = scheduler(max_num_seqs=2)
    for number in (1, 2, 3, 4):
        busy.add(sequence(number, 3, max_tokens=2))
    plan = busy.schedule(100)
    assert started(plan) == [1, 2]
    assert [part.lane for part in plan.scheduled] == [0, 1]
    assert busy.load().waiting == 2
    busy.update(plan, results(plan, EOS, PLAIN))
    assert started(busy.schedule(100)) == [3]


def test_a_large_sequence_at_the_head_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    full = scheduler(total_blocks=10, block_size=4)
    full.add(sequence(1, 4, max_tokens=4))
    step(full)
    full.add(sequence(2, 36, max_tokens=4))
    full.add(sequence(3, 4, max_tokens=4))
    for _ in range(2):
        assert full.schedule(100).started == ()
        step(full)
    assert step(full)[0].finish_reason is EngineFinishReason.LENGTH
    assert started(full.schedule(100)) == [2]


def test_a_sequence_starts_when_exactly_what_it_may_ever_need_is_free_and_not_a_token_sooner() -> None:
    for max_tokens, starts in ((4, True), (5, False)):
        exact = scheduler(total_blocks=4, block_size=4)
        exact.add(sequence(1, 4, max_tokens=4))
        step(exact)
        exact.add(sequence(2, 4, max_tokens=max_tokens))
        assert bool(exact.schedule(100).started) is starts


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
    assert (advance.sequence.seq_no, advance.sequence.lane, token_of(advance), advance.finish_reason) == (
        2,
        None,
        None,
        EngineFinishReason.ABORTED,
    )
    assert one.load().waiting == 0
    one.check_integrity()


def test_an_aborted_sequence_names_its_lane_and_leaves_it_and_its_blocks_to_the_next() -> None:
    one = scheduler(total_blocks=4, block_size=4, max_num_seqs=1)
    one.add(sequence(1, 8, max_tokens=8))
    step(one)
    advance = one.abort(1)
    assert advance is not None
    assert (advance.sequence.lane, advance.finish_reason) == (0, EngineFinishReason.ABORTED)
    assert held(one) == messages.Load(free_blocks=4)
    one.add(sequence(2, 8, max_tokens=8))
    assert [part.lane for part in one.schedule(100).scheduled] == [0]


def test_aborting_what_is_unknown_or_has_ended_does_nothing() -> None:
    one = scheduler()
    one.add(sequence(1, 3, max_tokens=1))
    assert one.abort(7) is None
    assert step(one)[0].finish_reason is EngineFinishReason.LENGTH
    assert one.abort(1) is None
    one.check_integrity()


def test_an_end_without_a_token_ends_only_its_own_sequence() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3))
    plan = two.schedule(100)
    advances = two.update(plan, results(plan, EngineFinishReason.BAD_LOGITS, PLAIN))
    assert [(a.sequence.seq_no, token_of(a), a.finish_reason) for a in advances] == [
        (1, None, EngineFinishReason.BAD_LOGITS),
        (2, PLAIN, None),
    ]
    assert sizes(two.schedule(100)) == [(2, 3, 1)]


def test_a_sequence_leaves_with_its_stop_token_and_with_its_last_token() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3, max_tokens=1, ignore_eos=True))
    advances = step(two, token_id=EOS)
    assert [(a.sequence.seq_no, token_of(a), a.finish_reason) for a in advances] == [
        (1, EOS, EngineFinishReason.STOP_TOKEN),
        (2, EOS, EngineFinishReason.LENGTH),
    ]
    assert not two.has_work


def test_results_must_match_the_parts_that_sample() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    with pytest.raises(AssertionError):
        one.update(one.schedule(4), [SampledToken(PLAIN)])


def test_the_load_counts_prompt_tokens_that_are_not_computed_yet_and_no_decodes() -> None:
    loaded = scheduler(total_blocks=20, block_size=4, max_num_seqs=2)
    loaded.add(sequence(1, 3, max_tokens=5))
    step(loaded)
    loaded.add(sequence(2, 10, max_tokens=2))
    loaded.add(sequence(3, 7, max_tokens=5))
    step(loaded, budget=4)
    assert held(loaded) == messages.Load(
        running=2, waiting=1, queued_prefill_tokens=6 + 7, used_blocks=2, free_blocks=18
    )


# turns


def test_a_priority_counts_like_having_come_so_much_later_and_ties_go_by_number() -> None:
    line = scheduler(max_num_seqs=1, priority_s=10.0)
    for number, priority, arrived_at in [
        (1, 0, 5.0),
        (2, 1, 0.0),
        (3, -1, 12.0),
        (4, 0, 10.0),
        (5, -1, 20.0),
        (6, 0, 2.0),
    ]:
        line.add(sequence(number, 1, max_tokens=1, priority=priority, arrived_at=arrived_at))
    assert [advance.sequence.seq_no for _ in range(6) for advance in step(line)] == [3, 6, 1, 2, 4, 5]


def test_nobody_is_overtaken_by_one_who_came_later_than_its_priority_makes_up_for() -> None:
    for arrived_at, order in ((9.0, [2, 1]), (10.0, [1, 2]), (11.0, [1, 2])):
        line = scheduler(max_num_seqs=1, priority_s=10.0)
        line.add(sequence(1, 1, max_tokens=1))
        line.add(sequence(2, 1, max_tokens=1, priority=-1, arrived_at=arrived_at))
        assert [advance.sequence.seq_no for _ in range(2) for advance in step(line)] == order


def test_the_budget_is_shared_out_in_turn_too() -> None:
    two = scheduler()
    two.add(sequence(1, 50))
    step(two, budget=10)
    two.add(sequence(2, 50, priority=-1))
    assert sizes(two.schedule(16)) == [(2, 0, 8), (1, 10, 8)]


def test_a_prompt_that_can_be_finished_in_a_step_is_and_a_longer_one_leaves_half_to_those_behind_it() -> None:
    three = scheduler()
    for number, length in ((1, 20), (2, 9), (3, 9), (4, 9)):
        three.add(sequence(number, length))
    assert sizes(three.schedule(24)) == [(1, 0, 20), (2, 0, 2), (3, 0, 1), (4, 0, 1)]
    long = scheduler()
    for number, length in ((1, 50), (2, 9), (3, 9)):
        long.add(sequence(number, length))
    assert sizes(long.schedule(24)) == [(1, 0, 12), (2, 0, 9), (3, 0, 3)]


def test_one_that_must_be_alone_has_every_step_for_itself_until_it_has_a_token() -> None:
    three = scheduler()
    three.add(sequence(1, 3))
    step(three)
    suspect = sequence(2, 20)
    suspect.isolated = True
    three.add(suspect)
    three.add(sequence(3, 5))
    plan = three.schedule(12)
    assert (sizes(plan), three.isolated) == ([(2, 0, 12)], suspect)
    three.update(plan, results(plan))
    assert sizes(three.schedule(12)) == [(2, 12, 8)]
    step(three)
    plan = three.schedule(12)
    assert (sizes(plan), three.isolated) == ([(1, 3, 1), (2, 20, 1), (3, 0, 5)], None)


def test_of_several_that_must_be_alone_one_is_first() -> None:
    two = scheduler()
    for number in (1, 2):
        suspect = sequence(number, 3)
        suspect.isolated = True
        two.add(suspect)
    assert [[advance.sequence.seq_no for advance in step(two)] for _ in range(3)] == [[1], [2], [1, 2]]


# shared prefixes and pressure, on a runner that notices every wrong token


class Machine:
    """A scheduler whose plans are carried out at once; prompts are texts of one tenant, blocks of four tokens."""

    def __init__(
        self,
        total_blocks: int = 32,
        max_num_seqs: int = 4,
        num_lanes: int = 8,
        *,
        host_blocks: int = 0,
        overcommit: float = 1.0,
        max_cached_blocks: int | None = None,
    ) -> None:
        config = make_config(
            kv_block_size=4, total_kv_blocks=total_blocks, host_kv_blocks=host_blocks, max_num_batched_tokens=999
        )
        self.runner = ArithmeticRunner(config, num_lanes=num_lanes)
        pool = BlockPool(total_blocks, 4, num_lanes, host_blocks=host_blocks, overcommit=overcommit)
        self.scheduler = Scheduler(pool, max_num_seqs, max_cached_blocks=max_cached_blocks)
        self.sequences: dict[int, Sequence] = {}
        self.ends: dict[int, EngineFinishReason] = {}

    def ask(self, seq_no: int, text: str, max_tokens: int = 4) -> Sequence:
        sampling = contract.Sampling(max_tokens=max_tokens, ignore_eos=True)
        token_ids = array("I", (ord(letter) % 90 for letter in text))
        one = Sequence(seq_no, token_ids, sampling, frozenset({EOS}), domain=Domain("acme"), arrived_at=float(seq_no))
        self.sequences[seq_no] = one
        self.scheduler.add(one)
        return one

    def step(self, budget: int = 99, transfer_blocks: int = 0) -> StepPlan:
        """One step, carried out."""
        plan = self.schedule(budget, transfer_blocks)
        if plan.scheduled:
            for advance in self.scheduler.update(plan, self.runner.step(plan)):
                self.note(advance)
        self.scheduler.check_integrity()
        return plan

    def schedule(self, budget: int = 99, transfer_blocks: int = 0) -> StepPlan:
        """A plan, of which only the moves are carried out."""
        plan = self.scheduler.schedule(budget, transfer_blocks)
        self.scheduler.check_integrity()
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        return plan

    def reclaim_memory(self) -> StepResult | None:
        advance = self.scheduler.reclaim_memory()
        self.scheduler.check_integrity()
        if advance is not None:
            self.note(advance)
        return advance

    def abort(self, seq_no: int) -> None:
        advance = self.scheduler.abort(seq_no)
        assert advance is not None
        self.note(advance)
        self.scheduler.check_integrity()

    def run(self, transfer_blocks: int = 0) -> None:
        """Until everybody has ended."""
        while self.scheduler.has_work:
            self.step(transfer_blocks=transfer_blocks)

    def answer(self, text: str, max_tokens: int = 4) -> list[int]:
        """What a sequence that is alone in the world says."""
        alone = Machine()
        one = alone.ask(1, text, max_tokens)
        alone.run()
        return said(one)

    def note(self, advance: StepResult) -> None:
        if advance.finish_reason is not None:
            assert advance.sequence.seq_no not in self.ends
            self.ends[advance.sequence.seq_no] = advance.finish_reason
            self.runner.remove_sequence(advance.sequence.seq_no)


def said(sequence: Sequence) -> list[int]:
    return list(sequence.token_ids[sequence.num_prompt :])


def test_what_is_cached_is_not_computed_again_and_is_counted_to_the_token() -> None:
    machine = Machine()
    machine.ask(1, "aaaabbbbcccc", max_tokens=1)
    machine.run()
    assert machine.runner.num_evaluated == 12
    two = machine.ask(2, "aaaabbbbccdd", max_tokens=1)
    machine.run()
    assert (two.num_cached, machine.runner.num_evaluated) == (10, 12 + 2)
    assert said(two) == machine.answer("aaaabbbbccdd", 1)
    assert machine.scheduler.load().computed_tokens == machine.runner.num_evaluated


def test_an_equal_prompt_computes_one_token() -> None:
    machine = Machine()
    for number in (1, 2):
        machine.ask(number, "aaaabbbb", max_tokens=1)
        machine.run()
    assert machine.sequences[2].num_cached == 7
    assert machine.runner.num_evaluated == 8 + 1
    assert said(machine.sequences[1]) == said(machine.sequences[2])


def test_of_several_that_would_compute_the_same_block_next_only_the_first_does_and_the_others_go_on_behind_it() -> None:
    machine = Machine()
    texts = ["aaaabbbbc", "aaaabbbbd", "aaaabbbbe"]
    for number, text in enumerate(texts, start=1):
        machine.ask(number, text)
    assert sizes(machine.step()) == [(1, 0, 9)]
    assert sizes(machine.step()) == [(1, 9, 1), (2, 8, 1), (3, 8, 1)]
    assert [one.num_cached for one in machine.sequences.values()] == [0, 8, 8]
    machine.run()
    assert [said(one) for one in machine.sequences.values()] == [machine.answer(text) for text in texts]


def test_those_that_wait_for_a_block_adopt_it_as_soon_as_it_is_complete() -> None:
    machine = Machine()
    machine.ask(1, "aaaabbbbc")
    machine.ask(2, "aaaaddddd")
    assert sizes(machine.step(budget=3)) == [(1, 0, 3)]
    assert sizes(machine.step(budget=3)) == [(1, 3, 3)]
    plan = machine.step(budget=3)
    assert plan.kv_ops == (Share(0, 1, 0, 4),)
    assert sizes(plan) == [(1, 6, 3)]
    assert machine.sequences[2].num_cached == 4


def test_where_the_one_that_computes_a_block_for_all_is_aborted_the_next_goes_on_from_what_it_had() -> None:
    machine = Machine()
    for number in (1, 2, 3):
        machine.ask(number, "aaaabbbb" + "cde"[number - 1])
    assert sizes(machine.step(budget=6)) == [(1, 0, 6)]
    machine.abort(1)
    assert sizes(machine.step()) == [(2, 6, 3)]
    assert sizes(machine.step()) == [(2, 9, 1), (3, 8, 1)]
    assert [one.num_cached for one in machine.sequences.values()] == [0, 6, 8]
    machine.run()
    assert machine.ends == {1: EngineFinishReason.ABORTED, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}
    assert said(machine.sequences[3]) == machine.answer("aaaabbbbe")


def test_prompts_that_share_nothing_do_not_wait_for_each_other() -> None:
    machine = Machine()
    machine.ask(1, "aaaab")
    machine.ask(2, "bbbba")
    machine.ask(3, "ccc")
    machine.ask(4, "ccc")
    assert sizes(machine.step()) == [(1, 0, 5), (2, 0, 5), (3, 0, 3), (4, 0, 3)]


@given(
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(0, 24)), min_size=1, max_size=10),
    budget=st.integers(1, 30),
    host_blocks=st.sampled_from([0, 5]),
)
@settings(max_examples=80)
def test_what_was_not_cached_was_computed_and_nothing_else(
    asked: list[tuple[int, int, int]], budget: int, host_blocks: int
) -> None:
    """Prompts of few families that fork at some place, together and one after the other."""
    machine = Machine(total_blocks=16, num_lanes=5, host_blocks=host_blocks, max_cached_blocks=6)
    for number, (family, length, fork) in enumerate(asked, start=1):
        text = ("abc"[family] * 2 + "de" * 20)[: min(fork, length)]
        machine.ask(number, text + chr(ord("k") + number) * (length - len(text)))
        machine.step(budget, transfer_blocks=2)
    while machine.scheduler.has_work:
        machine.step(budget, transfer_blocks=2)
    assert machine.scheduler.preemptions == 0
    every = machine.sequences.values()
    computed = sum(one.num_prompt - one.num_cached + one.num_sampled - 1 for one in every)
    assert machine.runner.num_evaluated == machine.scheduler.load().computed_tokens == computed


# over-commitment


def pressed() -> Machine:
    """Room for four blocks is promised twice: two sequences that will each hold three."""
    machine = Machine(total_blocks=4, overcommit=2.0)
    machine.ask(1, "aaaaaaaa", max_tokens=4)
    machine.ask(2, "bbbbbbbb", max_tokens=4)
    return machine


def test_with_over_commitment_the_last_in_turn_is_preempted_and_keeps_what_it_sampled() -> None:
    machine = pressed()
    assert sizes(machine.step()) == [(1, 0, 8), (2, 0, 8)]
    (first,) = said(machine.sequences[2])
    plan = machine.step()
    assert sizes(plan) == [(1, 8, 1)]
    two = machine.sequences[2]
    assert (two.lane, two.num_computed, two.preemptions, said(two)) == (None, 0, 1, [first])
    assert machine.scheduler.preemptions == 1
    machine.run()
    assert machine.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert said(two) == machine.answer("bbbbbbbb")
    assert said(machine.sequences[1]) == machine.answer("aaaaaaaa")


def test_one_that_was_preempted_comes_back_only_to_a_whole_promise_and_is_not_begun_twice() -> None:
    machine = pressed()
    machine.step()
    running = []
    while 1 not in machine.ends:
        machine.step()
        running.append(machine.scheduler.load().running)
    assert running == [1, 1, 0]
    plan = machine.step()
    assert [part.sequence.seq_no for part in plan.scheduled] == [2]
    assert plan.started == ()


def test_what_one_that_was_preempted_still_finds_of_itself_it_need_not_compute_again() -> None:
    machine = pressed()
    while 1 not in machine.ends:
        machine.step()
    (part,) = machine.step().scheduled
    assert (part.start, part.num_tokens) == (4, 5)
    machine.run()
    assert machine.sequences[2].num_cached == 0
    assert machine.runner.num_evaluated == machine.scheduler.load().computed_tokens == 2 * (8 + 3) + 4


def test_a_prompt_gives_way_to_those_before_it_and_never_to_those_behind() -> None:
    machine = Machine(total_blocks=4, overcommit=2.0)
    machine.ask(1, "aaaa", max_tokens=4)
    machine.ask(2, "b" * 15, max_tokens=1)
    assert sizes(machine.step(budget=14)) == [(1, 0, 4), (2, 0, 10)]
    assert sizes(machine.step()) == [(1, 4, 1)]
    machine.run()
    assert machine.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert [one.preemptions for one in machine.sequences.values()] == [0, 1]
    assert said(machine.sequences[2]) == machine.answer("b" * 15, 1)


def test_one_that_decodes_in_this_step_already_is_not_preempted_for_a_prompt_before_it() -> None:
    machine = Machine(total_blocks=4, overcommit=2.0)
    machine.ask(1, "a" * 12, max_tokens=1)
    machine.ask(2, "bbbb", max_tokens=5)
    assert sizes(machine.step(budget=8)) == [(1, 0, 4), (2, 0, 4)]
    assert sizes(machine.step(budget=8)) == [(2, 4, 1)]
    machine.run()
    assert machine.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert machine.scheduler.preemptions == 0


# where the device has less room than it said


def test_first_idle_blocks_give_way_then_the_last_in_turn_and_one_that_is_alone_ends() -> None:
    machine = Machine()
    machine.ask(9, "zzzz", max_tokens=1)
    machine.run()
    for number, text in ((1, "aaaa"), (2, "bbbb")):
        machine.ask(number, text)
    machine.step()
    load = machine.scheduler.load()
    assert (load.running, load.cached_blocks) == (2, 1)
    assert machine.reclaim_memory() is None
    load = machine.scheduler.load()
    assert (load.running, load.waiting, load.cached_blocks) == (2, 0, 0)
    assert machine.reclaim_memory() is None
    load = machine.scheduler.load()
    assert (load.running, load.waiting) == (1, 1)
    assert machine.sequences[2].preemptions == 1
    machine.scheduler.clear_cache()
    machine.abort(2)
    advance = machine.reclaim_memory()
    assert advance is not None
    assert (advance.sequence.seq_no, advance.sampled, advance.finish_reason) == (
        1,
        None,
        EngineFinishReason.INSUFFICIENT_MEMORY,
    )


def test_the_last_in_turn_gives_way_whoever_began_last() -> None:
    machine = Machine()
    two = machine.ask(2, "bbbb")
    machine.step()
    machine.ask(1, "aaaa")
    machine.step()
    machine.reclaim_memory()
    assert (two.lane, two.preemptions) == (None, 1)


# host memory


def saved(transfer_blocks: int) -> tuple[Machine, StepPlan]:
    """Three blocks are idle, and none may be."""
    machine = Machine(host_blocks=8, max_cached_blocks=0)
    machine.ask(1, "aaaabbbbcccc", max_tokens=1)
    machine.step()
    return machine, machine.step(transfer_blocks=transfer_blocks)


def count(plan: StepPlan, kind: type[Offload] | type[Onload]) -> int:
    return sum(isinstance(move, kind) for move in plan.kv_ops)


@pytest.mark.parametrize(("transfer_blocks", "saves"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_no_more_blocks_are_saved_in_a_step_than_its_plan_may(transfer_blocks: int, saves: int) -> None:
    machine, plan = saved(transfer_blocks)
    assert count(plan, Offload) == saves
    assert machine.scheduler.load().cached_blocks == 3 - saves


def test_blocks_come_back_as_many_in_a_step_as_its_plan_may_and_the_prompt_waits_for_them() -> None:
    machine, _ = saved(transfer_blocks=3)
    two = machine.ask(2, "aaaabbbbccccd")
    plans = [machine.step(transfer_blocks=1) for _ in range(4)]
    assert [count(plan, Onload) for plan in plans] == [1, 1, 1, 0]
    assert [sizes(plan) for plan in plans] == [[], [], [(2, 12, 1)], [(2, 13, 1)]]
    assert (two.num_cached, machine.runner.num_evaluated) == (12, 12 + 2)
    machine.run()
    assert said(two) == machine.answer("aaaabbbbccccd")


def test_all_blocks_come_back_at_once_where_the_plan_may() -> None:
    machine, _ = saved(transfer_blocks=3)
    machine.ask(2, "aaaabbbbccccd")
    plan = machine.step(transfer_blocks=3)
    assert (count(plan, Onload), sizes(plan)) == (3, [(2, 12, 1)])


def test_blocks_that_were_saved_are_cut_from_their_lane_once() -> None:
    _, plan = saved(transfer_blocks=3)
    assert [move for move in plan.kv_ops if isinstance(move, Truncate)] == [Truncate(0, 0)]


def test_part_of_a_plan_names_tokens_and_lane() -> None:
    machine = Machine()
    one = machine.ask(1, "abcdefgh")
    (part,) = machine.schedule(budget=5).scheduled
    assert part == ScheduledTokens(one, 0, 5)
    assert (part.lane, part.token_ids, part.samples) == (0, one.token_ids[:5], False)


def test_a_suspect_takes_the_room_it_needs_from_those_before_it() -> None:
    one = scheduler(total_blocks=4, block_size=4, overcommit=2.0)
    one.add(sequence(1, 8, max_tokens=4))
    step(one)
    step(one)
    one.add(sequence(2, 8, max_tokens=4, isolated=True))
    for _ in range(20):
        step(one)
    assert not one.has_work


def test_what_was_preempted_for_want_of_room_is_not_started_again_at_once() -> None:
    one = scheduler(total_blocks=100, block_size=4)
    one.add(sequence(1, 5))
    one.add(sequence(2, 5))
    for _ in range(100):
        plan = one.schedule(100)
        if len(plan.scheduled) > 1:
            assert one.reclaim_memory() is None
        else:
            one.update(plan, results(plan))
        one.check_integrity()
    assert not one.has_work
