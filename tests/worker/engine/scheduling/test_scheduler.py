"""The scheduler plans decodes first, then prompts in fair chunks within the budget, in the order of priority."""

from array import array

import msgspec
import pytest

from tests.support.executed_scheduler import EOS, sizes
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.matcher import Matcher
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, StepPlan, StepResult
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

PLAIN = 5


def scheduler(
    *,
    total_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    expected_tokens: int = 0,
    priority_s: float = 1.0,
    row_tiles: RowTiles | None = None,
) -> Scheduler:
    pool = BlockPool(total_blocks, block_size, max_num_seqs)
    return Scheduler(pool, max_num_seqs, priority_s=priority_s, expected_tokens=expected_tokens, row_tiles=row_tiles)


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
    asked = engine_request.Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    token_ids = array("I", [1 + place % 9 for place in range(num_prompt)])
    return Sequence(
        seq_no, token_ids, asked, frozenset({EOS}), priority=priority, arrived_at=arrived_at, isolated=isolated
    )


def results(plan: StepPlan, *token_ids: int | EngineFinishReason) -> list[Outcome]:
    """The outcome of each entry: PLAIN for those beyond `token_ids` that sample."""
    count = sum(part.samples for part in plan.scheduled)
    said = iter([*token_ids, *[PLAIN] * (count - len(token_ids))])
    sampled = (one if isinstance(one, EngineFinishReason) else SampledToken(one) for one in said)
    outcomes = [next(sampled) if part.samples else None for part in plan.scheduled]
    assert next(sampled, None) is None, "more results than entries that sample"
    return outcomes


def step(scheduler: Scheduler, budget: int = 1_000, token_id: int = PLAIN) -> list[StepResult]:
    """Schedules a step and updates; every entry that samples gets `token_id`."""
    plan = scheduler.schedule(budget)
    scheduler.check_integrity()
    step_results = scheduler.update(plan, results(plan, *[token_id for part in plan.scheduled if part.samples]))
    scheduler.check_integrity()
    return step_results


def token_of(result: StepResult) -> int | None:
    return None if result.sampled is None else result.sampled.token_id


def started(plan: StepPlan) -> list[int]:
    return [sequence.seq_no for sequence in plan.started]


def load_now(scheduler: Scheduler) -> messages.Load:
    """The load of a scheduler without the counters of all it has done."""
    counts = {"generated_tokens": 0, "computed_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
    return msgspec.structs.replace(scheduler.load(), **counts)


def test_with_nothing_to_do_the_plan_is_empty() -> None:
    idle = scheduler()
    assert not idle.has_work
    assert idle.schedule(100) == StepPlan((), (), ())


def test_a_prompt_within_the_budget_is_computed_at_once_and_samples_a_token() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    plan = one.schedule(10)
    assert sizes(plan) == [(1, 0, 10)]
    assert started(plan) == [1]
    assert plan.scheduled[0].samples
    assert plan.num_tokens == 10
    (result,) = one.update(plan, results(plan))
    assert (result.sequence.seq_no, token_of(result), result.finish_reason) == (1, PLAIN, None)
    assert sizes(one.schedule(10)) == [(1, 10, 1)]


def test_a_prompt_one_token_longer_than_the_budget_takes_two_steps_and_samples_in_the_second() -> None:
    one = scheduler()
    one.add(sequence(1, 12))
    plan = one.schedule(11)
    assert sizes(plan) == [(1, 0, 11)]
    assert not plan.scheduled[0].samples
    assert one.update(plan, [None]) == []
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


def test_the_oldest_prompt_gets_half_of_the_budget_and_the_last_one_the_rest() -> None:
    three = scheduler()
    for number in (1, 2, 3):
        three.add(sequence(number, 50))
    assert sizes(three.schedule(16)) == [(1, 0, 8), (2, 0, 4), (3, 0, 4)]


def test_the_budget_that_a_short_prompt_leaves_goes_to_those_behind_it() -> None:
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


def test_where_a_tile_takes_as_long_as_the_budget_a_prompt_gets_the_whole_tile() -> None:
    one = scheduler(row_tiles=RowTiles(rows=8, token_cost=1.0, tile_cost=1.0))
    one.add(sequence(1, 30))
    assert sizes(one.schedule(5)) == [(1, 0, 8)]


def test_a_filled_tile_never_exceeds_the_tokens_of_a_step() -> None:
    pool = BlockPool(100, 4, 4)
    one = Scheduler(pool, 4, max_step_tokens=10, row_tiles=RowTiles(rows=8, token_cost=9.0, tile_cost=1.0))
    for seq_no in (1, 2):
        one.add(sequence(seq_no, 30))
    assert sizes(one.schedule(10)) == [(1, 0, 8), (2, 0, 2)]


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


def test_a_sequence_starts_when_everything_it_may_ever_need_can_be_reserved() -> None:
    for max_tokens, starts in ((4, True), (5, False)):
        exact = scheduler(total_blocks=4, block_size=4)
        exact.add(sequence(1, 4, max_tokens=4))
        step(exact)
        exact.add(sequence(2, 4, max_tokens=max_tokens))
        assert bool(exact.schedule(100).started) is starts


def test_a_sequence_that_does_not_fit_an_empty_pool_is_refused() -> None:
    small = scheduler(total_blocks=4, block_size=4)
    small.add(sequence(1, 8, max_tokens=8))
    with pytest.raises(AssertionError):
        small.add(sequence(2, 8, max_tokens=9))
    assert small.load().waiting == 1


def test_a_waiting_sequence_is_aborted_before_it_has_a_lane() -> None:
    one = scheduler(max_num_seqs=1)
    one.add(sequence(1, 3))
    one.add(sequence(2, 3))
    step(one)
    result = one.abort(2)
    assert result is not None
    assert (result.sequence.seq_no, result.sequence.lane, token_of(result), result.finish_reason) == (
        2,
        None,
        None,
        EngineFinishReason.ABORTED,
    )
    assert one.load().waiting == 0
    one.check_integrity()


def test_an_aborted_sequence_frees_its_lane_and_blocks_for_the_next() -> None:
    one = scheduler(total_blocks=4, block_size=4, max_num_seqs=1)
    one.add(sequence(1, 8, max_tokens=8))
    step(one)
    result = one.abort(1)
    assert result is not None
    assert (result.sequence.lane, result.finish_reason) == (0, EngineFinishReason.ABORTED)
    assert load_now(one) == messages.Load(free_blocks=4, expected_answer_tokens=64)
    one.add(sequence(2, 8, max_tokens=8))
    assert [part.lane for part in one.schedule(100).scheduled] == [0]


def test_aborting_an_unknown_or_finished_sequence_does_nothing() -> None:
    one = scheduler()
    one.add(sequence(1, 3, max_tokens=1))
    assert one.abort(7) is None
    assert step(one)[0].finish_reason is EngineFinishReason.LENGTH
    assert one.abort(1) is None
    one.check_integrity()


def test_a_finish_reason_without_a_token_ends_only_its_own_sequence() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3))
    plan = two.schedule(100)
    step_results = two.update(plan, results(plan, EngineFinishReason.BAD_LOGITS, PLAIN))
    assert [(a.sequence.seq_no, token_of(a), a.finish_reason) for a in step_results] == [
        (1, None, EngineFinishReason.BAD_LOGITS),
        (2, PLAIN, None),
    ]
    assert sizes(two.schedule(100)) == [(2, 3, 1)]


def test_a_sequence_ends_with_its_stop_token_or_its_last_token() -> None:
    two = scheduler()
    two.add(sequence(1, 3))
    two.add(sequence(2, 3, max_tokens=1, ignore_eos=True))
    step_results = step(two, token_id=EOS)
    assert [(a.sequence.seq_no, token_of(a), a.finish_reason) for a in step_results] == [
        (1, EOS, EngineFinishReason.STOP_TOKEN),
        (2, EOS, EngineFinishReason.LENGTH),
    ]
    assert not two.has_work


def test_there_must_be_a_result_for_each_entry_that_samples() -> None:
    one = scheduler()
    one.add(sequence(1, 10))
    with pytest.raises(AssertionError):
        one.update(one.schedule(4), [SampledToken(PLAIN)])


def test_the_load_counts_what_started_prompts_have_yet_to_compute_and_will_use_and_no_decodes() -> None:
    loaded = scheduler(total_blocks=20, block_size=4, max_num_seqs=2)
    loaded.add(sequence(1, 3, max_tokens=5))
    step(loaded)
    loaded.add(sequence(2, 10, max_tokens=2))
    loaded.add(sequence(3, 7, max_tokens=5))
    step(loaded, budget=4)
    assert load_now(loaded) == messages.Load(
        running=2,
        waiting=1,
        queued_prefill_tokens=6,
        used_blocks=2,
        free_blocks=18,
        expected_blocks=2 + 3,
        expected_answer_tokens=256,
    )


# turns


def test_a_priority_counts_like_a_later_arrival_and_ties_go_by_number() -> None:
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
    assert [result.sequence.seq_no for _ in range(6) for result in step(line)] == [3, 6, 1, 2, 4, 5]


def test_nobody_is_overtaken_by_one_that_came_later_than_its_priority_makes_up_for() -> None:
    for arrived_at, order in ((9.0, [2, 1]), (10.0, [1, 2]), (11.0, [1, 2])):
        line = scheduler(max_num_seqs=1, priority_s=10.0)
        line.add(sequence(1, 1, max_tokens=1))
        line.add(sequence(2, 1, max_tokens=1, priority=-1, arrived_at=arrived_at))
        assert [result.sequence.seq_no for _ in range(2) for result in step(line)] == order


def test_the_budget_is_shared_out_by_priority_too() -> None:
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


def test_an_isolated_sequence_has_every_step_for_itself_until_it_has_a_token() -> None:
    three = scheduler()
    three.add(sequence(1, 3))
    step(three)
    isolated = sequence(2, 20)
    isolated.isolated = True
    three.add(isolated)
    three.add(sequence(3, 5))
    plan = three.schedule(12)
    assert (sizes(plan), three.isolated) == ([(2, 0, 12)], isolated)
    three.update(plan, results(plan))
    assert sizes(three.schedule(12)) == [(2, 12, 8)]
    step(three)
    plan = three.schedule(12)
    assert (sizes(plan), three.isolated) == ([(1, 3, 1), (2, 20, 1), (3, 0, 5)], None)


def test_isolated_sequences_take_their_steps_one_after_the_other() -> None:
    two = scheduler()
    for number in (1, 2):
        isolated = sequence(number, 3)
        isolated.isolated = True
        two.add(isolated)
    assert [[result.sequence.seq_no for result in step(two)] for _ in range(3)] == [[1], [2], [1, 2]]


def test_an_isolated_sequence_takes_the_room_it_needs_from_those_before_it() -> None:
    one = scheduler(total_blocks=4, block_size=4, expected_tokens=1)
    one.add(sequence(1, 8, max_tokens=4))
    step(one)
    step(one)
    one.add(sequence(2, 8, max_tokens=4, isolated=True))
    for _ in range(20):
        step(one)
    assert not one.has_work


def test_a_sequence_preempted_for_lack_of_room_is_not_started_again_at_once() -> None:
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


class Constrained(Matcher):
    """A matcher that becomes ready when a test wants it."""

    def __init__(self) -> None:
        self.is_ready = True


def test_a_sequence_whose_constraint_is_not_ready_is_left_out_and_nobody_waits_for_it() -> None:
    two = scheduler()
    matcher = Constrained()
    asked = engine_request.Sampling(max_tokens=8)
    two.add(Sequence(1, array("I", [1, 2]), asked, frozenset({EOS}), matcher=matcher))
    two.add(sequence(2, 2))
    step(two)
    matcher.is_ready = False
    assert sizes(two.schedule(10)) == [(2, 2, 1)]
    two.abort(2)
    assert (sizes(two.schedule(10)), two.has_work) == ([], True)
    two.add(sequence(3, 2))
    assert sizes(two.schedule(10)) == [(3, 0, 2)]
    matcher.is_ready = True
    assert [size[0] for size in sizes(two.schedule(10))] == [1, 3]
