"""Sequences share prefixes, wait for copies from host memory, and give memory up to those before them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executed_scheduler import ExecutedScheduler, generated, sizes
from tokenbus.worker.engine.kv.ops import Offload, Onload, Share, Truncate
from tokenbus.worker.engine.scheduling.counters import SchedulerCounts
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason


def test_cached_tokens_are_not_computed_again_and_are_counted() -> None:
    executed = ExecutedScheduler()
    executed.add(1, "aaaabbbbcccc", max_tokens=1)
    executed.run()
    assert executed.runner.num_evaluated == 12
    two = executed.add(2, "aaaabbbbccdd", max_tokens=1)
    executed.run()
    assert (two.num_cached, executed.runner.num_evaluated) == (10, 12 + 2)
    assert generated(two) == executed.answer("aaaabbbbccdd", 1)
    assert executed.scheduler.load().computed_tokens == executed.runner.num_evaluated


def test_an_equal_prompt_computes_one_token() -> None:
    executed = ExecutedScheduler()
    for number in (1, 2):
        executed.add(number, "aaaabbbb", max_tokens=1)
        executed.run()
    assert executed.sequences[2].num_cached == 7
    assert executed.runner.num_evaluated == 8 + 1
    assert generated(executed.sequences[1]) == generated(executed.sequences[2])


def test_a_block_that_several_need_next_is_computed_by_the_first_and_reused_by_the_others() -> None:
    executed = ExecutedScheduler()
    texts = ["aaaabbbbc", "aaaabbbbd", "aaaabbbbe"]
    for number, text in enumerate(texts, start=1):
        executed.add(number, text)
    assert sizes(executed.step()) == [(1, 0, 9)]
    assert sizes(executed.step()) == [(1, 9, 1), (2, 8, 1), (3, 8, 1)]
    assert [one.num_cached for one in executed.sequences.values()] == [0, 8, 8]
    executed.run()
    assert [generated(one) for one in executed.sequences.values()] == [executed.answer(text) for text in texts]


def test_those_that_wait_for_a_block_reuse_it_as_soon_as_it_is_complete() -> None:
    executed = ExecutedScheduler()
    executed.add(1, "aaaabbbbc")
    executed.add(2, "aaaaddddd")
    assert sizes(executed.step(budget=3)) == [(1, 0, 3)]
    assert sizes(executed.step(budget=3)) == [(1, 3, 3)]
    plan = executed.step(budget=3)
    assert plan.kv_ops == (Share(0, 1, 0, 4),)
    assert sizes(plan) == [(1, 6, 3)]
    assert executed.sequences[2].num_cached == 4


def test_when_the_one_that_computes_a_block_for_all_is_aborted_the_next_goes_on_with_it() -> None:
    executed = ExecutedScheduler()
    for number in (1, 2, 3):
        executed.add(number, "aaaabbbb" + "cde"[number - 1])
    assert sizes(executed.step(budget=6)) == [(1, 0, 6)]
    executed.abort(1)
    assert sizes(executed.step()) == [(2, 6, 3)]
    assert sizes(executed.step()) == [(2, 9, 1), (3, 8, 1)]
    assert [one.num_cached for one in executed.sequences.values()] == [0, 6, 8]
    executed.run()
    assert executed.ends == {1: EngineFinishReason.ABORTED, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}
    assert generated(executed.sequences[3]) == executed.answer("aaaabbbbe")


def test_prompts_that_share_nothing_do_not_wait_for_each_other() -> None:
    executed = ExecutedScheduler()
    executed.add(1, "aaaab")
    executed.add(2, "bbbba")
    executed.add(3, "ccc")
    executed.add(4, "ccc")
    assert sizes(executed.step()) == [(1, 0, 5), (2, 0, 5), (3, 0, 3), (4, 0, 3)]


@given(
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(0, 24)), min_size=1, max_size=10),
    budget=st.integers(1, 30),
    host_blocks=st.sampled_from([0, 5]),
)
@settings(max_examples=80)
def test_exactly_the_tokens_that_were_not_cached_are_computed(
    asked: list[tuple[int, int, int]], budget: int, host_blocks: int
) -> None:
    """Prompts of few families, which fork somewhere, run together and one after the other."""
    executed = ExecutedScheduler(total_blocks=16, num_lanes=5, host_blocks=host_blocks, max_cached_blocks=6)
    for number, (family, length, fork) in enumerate(asked, start=1):
        text = ("abc"[family] * 2 + "de" * 20)[: min(fork, length)]
        executed.add(number, text + chr(ord("k") + number) * (length - len(text)))
        executed.step(budget, transfer_blocks=2)
    while executed.scheduler.has_work:
        executed.step(budget, transfer_blocks=2)
    assert executed.scheduler.counts.preemptions == 0
    every = executed.sequences.values()
    computed = sum(one.num_prompt - one.num_cached + one.num_sampled - 1 for one in every)
    assert executed.runner.num_evaluated == executed.scheduler.load().computed_tokens == computed


# sequences that use more than was expected


def outgrowing() -> ExecutedScheduler:
    """Two sequences of which one token is expected, so that two of four blocks do for each; both will use three."""
    executed = ExecutedScheduler(total_blocks=4, expected_tokens=1)
    executed.add(1, "aaaaaaa", max_tokens=5)
    executed.add(2, "bbbbbbb", max_tokens=5)
    return executed


def test_the_last_sequence_is_preempted_for_one_that_outgrows_what_was_expected_and_keeps_what_it_sampled() -> None:
    executed = outgrowing()
    assert [sizes(executed.step()) for _ in range(2)] == [[(1, 0, 7), (2, 0, 7)], [(1, 7, 1), (2, 7, 1)]]
    sampled = generated(executed.sequences[2])
    two = executed.sequences[2]
    plan = executed.step()
    assert (sizes(plan), plan.preempted) == ([(1, 8, 1)], (two,))
    assert (two.lane, two.num_computed, two.preemptions, generated(two)) == (None, 0, 1, sampled)
    assert executed.scheduler.counts.preemptions == 1
    executed.run()
    assert executed.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert generated(two) == executed.answer("bbbbbbb", 5)
    assert generated(executed.sequences[1]) == executed.answer("aaaaaaa", 5)


def test_a_preempted_sequence_waits_for_all_the_room_it_expects_and_is_not_reported_as_started_again() -> None:
    executed = outgrowing()
    executed.step()
    executed.step()
    running = []
    while 1 not in executed.ends:
        executed.step()
        running.append(executed.scheduler.load().running)
    assert running == [1, 1, 0]
    plan = executed.step()
    assert [part.sequence.seq_no for part in plan.scheduled] == [2]
    assert plan.started == ()


def test_a_preempted_sequence_reuses_its_own_cached_blocks() -> None:
    executed = outgrowing()
    while 1 not in executed.ends:
        executed.step()
    (part,) = executed.step().scheduled
    assert (part.start, part.num_tokens) == (4, 5)
    executed.run()
    assert executed.sequences[2].num_cached == 0
    assert executed.runner.num_evaluated == executed.scheduler.load().computed_tokens == 2 * (7 + 4) + 4
    counts = executed.scheduler.counts
    assert (counts.preemptions, counts.restored_tokens, counts.recomputed_tokens) == (1, 4, 4)


def test_a_preempted_sequence_moves_to_host_memory_and_back_and_computes_nothing_again() -> None:
    executed = ExecutedScheduler(total_blocks=4, expected_tokens=1, host_blocks=4)
    executed.add(1, "aaaaaaa", max_tokens=9)
    executed.add(2, "bbbbbbb", max_tokens=9)
    onloads = 0
    while executed.scheduler.has_work:
        onloads += count(executed.step(transfer_blocks=9), Onload)
    assert (executed.sequences[2].preemptions, onloads) == (1, 2)
    assert executed.scheduler.counts == SchedulerCounts(
        preemptions=1, restored_tokens=8, evicted_blocks=6, offloaded_blocks=6, onloaded_blocks=2
    )
    assert executed.runner.num_evaluated == 2 * (7 + 8)
    assert generated(executed.sequences[2]) == executed.answer("bbbbbbb", 9)


def test_the_load_does_not_count_the_tokens_of_preempted_sequences_as_prompts_to_be_computed() -> None:
    executed = outgrowing()
    while not executed.scheduler.counts.preemptions:
        executed.step()
    assert executed.scheduler.load().queued_prefill_tokens == 0


def test_a_prompt_is_preempted_for_those_before_it_and_never_for_those_behind() -> None:
    executed = ExecutedScheduler(total_blocks=5, expected_tokens=1)
    executed.add(1, "aaaa", max_tokens=8)
    executed.add(2, "b" * 11, max_tokens=1)
    assert sizes(executed.step(budget=13)) == [(1, 0, 4), (2, 0, 9)]
    for place in range(4, 9):
        assert executed.scheduler.counts.preemptions == 0
        assert sizes(executed.step(budget=0)) == [(1, place, 1)]
    executed.run()
    assert executed.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert [one.preemptions for one in executed.sequences.values()] == [0, 1]
    assert generated(executed.sequences[2]) == executed.answer("b" * 11, 1)


def test_one_that_decodes_in_this_step_already_is_not_preempted_for_a_prompt_before_it() -> None:
    executed = ExecutedScheduler(total_blocks=6, expected_tokens=1)
    executed.add(1, "a" * 18, max_tokens=1)
    executed.add(2, "bbb", max_tokens=20)
    assert sizes(executed.step(budget=7)) == [(1, 0, 4), (2, 0, 3)]
    plans = [sizes(executed.step(budget=4)) for _ in range(4)]
    assert plans == [[(2, 3, 1), (1, 4, 4)], [(2, 4, 1), (1, 8, 4)], [(2, 5, 1), (1, 12, 4)], [(2, 6, 1)]]
    assert executed.scheduler.counts.preemptions == 0
    executed.run()
    assert executed.ends == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}


# where the device has less room than it said


def test_reclaiming_memory_clears_the_cache_then_preempts_the_last_and_ends_a_lone_sequence() -> None:
    executed = ExecutedScheduler()
    executed.add(9, "zzzz", max_tokens=1)
    executed.run()
    for number, text in ((1, "aaaa"), (2, "bbbb")):
        executed.add(number, text)
    executed.step()
    load = executed.scheduler.load()
    assert (load.running, load.cached_blocks) == (2, 1)
    assert executed.reclaim_memory() is None
    load = executed.scheduler.load()
    assert (load.running, load.waiting, load.cached_blocks) == (2, 0, 0)
    assert executed.reclaim_memory() is None
    load = executed.scheduler.load()
    assert (load.running, load.waiting) == (1, 1)
    assert executed.sequences[2].preemptions == 1
    executed.pool.clear()
    executed.abort(2)
    result = executed.reclaim_memory()
    assert result is not None
    assert (result.sequence.seq_no, result.sampled, result.finish_reason) == (
        1,
        None,
        EngineFinishReason.INSUFFICIENT_MEMORY,
    )


def test_the_last_by_priority_is_preempted_whoever_started_last() -> None:
    executed = ExecutedScheduler()
    two = executed.add(2, "bbbb")
    executed.step()
    executed.add(1, "aaaa")
    executed.step()
    executed.reclaim_memory()
    assert (two.lane, two.preemptions) == (None, 1)


# host memory


def offloaded(transfer_blocks: int) -> tuple[ExecutedScheduler, StepPlan]:
    """Three blocks are evictable, and none may stay on the device."""
    executed = ExecutedScheduler(host_blocks=8, max_cached_blocks=0)
    executed.add(1, "aaaabbbbcccc", max_tokens=1)
    executed.step()
    return executed, executed.step(transfer_blocks=transfer_blocks)


def count(plan: StepPlan, kind: type[Offload] | type[Onload]) -> int:
    return sum(isinstance(op, kind) for op in plan.kv_ops)


@pytest.mark.parametrize(("transfer_blocks", "offloads"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_no_more_blocks_are_offloaded_before_a_step_than_the_limit(transfer_blocks: int, offloads: int) -> None:
    executed, plan = offloaded(transfer_blocks)
    assert count(plan, Offload) == offloads
    assert executed.scheduler.load().cached_blocks == 3 - offloads


def test_a_prompt_waits_for_blocks_that_are_onloaded_step_by_step() -> None:
    executed, _ = offloaded(transfer_blocks=3)
    two = executed.add(2, "aaaabbbbccccd")
    plans = [executed.step(transfer_blocks=1) for _ in range(4)]
    assert [count(plan, Onload) for plan in plans] == [1, 1, 1, 0]
    assert [sizes(plan) for plan in plans] == [[], [], [(2, 12, 1)], [(2, 13, 1)]]
    assert (two.num_cached, executed.runner.num_evaluated) == (12, 12 + 2)
    executed.run()
    assert generated(two) == executed.answer("aaaabbbbccccd")


def test_all_blocks_are_onloaded_at_once_within_the_limit() -> None:
    executed, _ = offloaded(transfer_blocks=3)
    executed.add(2, "aaaabbbbccccd")
    plan = executed.step(transfer_blocks=3)
    assert (count(plan, Onload), sizes(plan)) == (3, [(2, 12, 1)])


def test_offloaded_blocks_are_truncated_from_their_lane_once() -> None:
    _, plan = offloaded(transfer_blocks=3)
    assert [op for op in plan.kv_ops if isinstance(op, Truncate)] == [Truncate(0, 0)]


def test_scheduled_tokens_name_tokens_and_lane() -> None:
    executed = ExecutedScheduler()
    one = executed.add(1, "abcdefgh")
    (part,) = executed.schedule(budget=5).scheduled
    assert part == ScheduledTokens(one, 0, 5)
    assert (part.lane, part.token_ids, part.samples) == (0, one.token_ids[:5], False)
