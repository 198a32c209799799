"""Whoever computes non-finite numbers ends, alone, after a bounded amount of work; all others get their answers."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.executed_scheduler import ExecutedScheduler, generated
from tests.support.poisonous import POISON, PoisonousRunner
from tokenbus.worker.engine.kv.ops import Wipe
from tokenbus.worker.engine.scheduling.plan import Undone
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

TEXT = [place % 7 for place in range(18)]
BAD = EngineFinishReason.BAD_LOGITS
LENGTH = EngineFinishReason.LENGTH


def poisonous(**settings: object) -> tuple[ExecutedScheduler, PoisonousRunner]:
    executed = ExecutedScheduler(total_blocks=64, make_runner=PoisonousRunner, **settings)  # type: ignore[arg-type]
    assert isinstance(executed.runner, PoisonousRunner)
    return executed, executed.runner


def alone(token_ids: list[int], max_tokens: int) -> list[int]:
    executed = ExecutedScheduler(total_blocks=64)
    one = executed.add_tokens(1, token_ids, max_tokens)
    executed.run()
    return generated(one)


def batches(executed: ExecutedScheduler) -> list[int]:
    """Takes a step; returns the number of shares in each of its batches."""
    plan = executed.schedule()
    sizes = [len(batch) for batch in plan.batches()]
    for result in executed.scheduler.update(plan, executed.runner.step(plan)):
        executed.take(result)
    return sizes


def test_one_that_fails_alone_is_tried_once_more_and_ends() -> None:
    executed, runner = poisonous()
    executed.add_tokens(1, [*TEXT[:6], POISON])
    executed.run()
    assert executed.ends == {1: BAD}
    assert (executed.scheduler.counts.poisoned_shares, runner.num_poisoned) == (2, 14)
    assert executed.scheduler.load().cached_blocks == 0
    assert runner.is_empty()


def test_of_a_whole_batch_only_the_culprit_ends_and_it_is_found_by_halves() -> None:
    executed, _ = poisonous()
    for number in range(1, 5):
        executed.add_tokens(number, [number] * 6, max_tokens=9)
    executed.step()
    executed.add_tokens(5, [POISON], max_tokens=9)
    executed.abort(4)
    assert [batches(executed) for _ in range(5)] == [[4], [2, 2], [2, 1, 1], [3, 1], [3]]
    executed.run()
    assert executed.ends == {1: LENGTH, 2: LENGTH, 3: LENGTH, 4: EngineFinishReason.ABORTED, 5: BAD}
    for number in (1, 2, 3):
        assert generated(executed.sequences[number]) == alone([number] * 6, 9)


def test_rows_that_are_finite_are_kept_and_their_sequences_never_suspected() -> None:
    executed, runner = poisonous()
    runner.reach = 0
    executed.add_tokens(1, TEXT, max_tokens=9)
    executed.step()
    executed.add_tokens(2, [POISON])
    for expected in (1, 2, 3):  # a token in each step, also in those that are poisoned
        assert executed.sequences[1].num_sampled == expected
        executed.step()
    assert executed.ends == {2: BAD}


def test_one_that_fails_after_what_it_has_reused_starts_over_without_it_and_all_of_it_goes() -> None:
    executed, _ = poisonous(host_blocks=16)
    executed.add_tokens(1, TEXT, max_tokens=1)
    executed.run(transfer_blocks=9)
    executed.pool.prefixes.take_events()
    one = executed.add_tokens(2, [*TEXT[:16], 80, 81])
    executed.step()
    assert one.num_cached == 16
    for _ in range(2):  # what it reuses poisons it, though nobody has noticed before
        plan = executed.schedule()
        executed.scheduler.update(plan, [Undone.POISONED])
        executed.scheduler.check_integrity()
    removed, stored = executed.pool.prefixes.take_events()
    assert (len(removed), stored) == (4, [])
    executed.run()
    assert executed.ends == {1: LENGTH, 2: LENGTH}
    assert generated(one) == alone([*TEXT[:16], 80, 81], 4)
    assert not executed.pool.prefixes.take_events().stored  # it shares nothing


def test_blocks_that_others_use_stay_when_one_that_has_reused_them_ends() -> None:
    executed, _ = poisonous()
    executed.add_tokens(1, TEXT, max_tokens=30)
    executed.step()
    executed.add_tokens(2, [*TEXT[:16], POISON])
    for _ in range(8):
        executed.step()
    assert executed.ends == {2: BAD}
    assert executed.scheduler.load().used_blocks >= 4
    executed.run()
    assert generated(executed.sequences[1]) == alone(TEXT, 30)


def test_a_suspect_that_gets_beyond_where_it_failed_is_computed_with_the_others_again() -> None:
    executed, _ = poisonous()
    one, other = executed.add_tokens(1, TEXT, 9), executed.add_tokens(2, TEXT[1:], 9)
    executed.step()
    plan = executed.schedule()
    executed.scheduler.update(plan, [Undone.POISONED, Undone.POISONED])
    assert one.apart != other.apart
    assert [batches(executed) for _ in range(2)] == [[1, 1], [2]]
    executed.run()
    assert executed.ends == {1: LENGTH, 2: LENGTH}


def test_what_a_lane_has_taken_over_is_dropped_before_anyone_beside_it_is_blamed() -> None:
    executed, _ = poisonous(num_lanes=9)
    executed.add_tokens(1, TEXT, max_tokens=1)
    executed.run()
    proven = executed.add_tokens(2, [50, 51, 52], max_tokens=9)
    executed.step()
    reusing, fresh = executed.add_tokens(3, [*TEXT[:16], 80]), executed.add_tokens(4, [60, 61])
    for _ in range(9):  # as long as a lane holds those blocks, all rows are none
        plan = executed.schedule()
        if reusing.domain is None:
            break
        assert not executed.scheduler.update(plan, [Undone.POISONED for _ in plan.scheduled])
    assert Wipe() in plan.kv_ops
    assert proven.domain == fresh.domain is not None
    for result in executed.scheduler.update(plan, executed.runner.step(plan)):
        executed.take(result)
    executed.run()
    assert executed.ends == dict.fromkeys((1, 2, 3, 4), LENGTH)


def is_poisonous(sequence: Sequence) -> bool:
    return POISON in sequence.token_ids


@given(
    prompts=st.lists(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, POISON]), min_size=1, max_size=30), max_size=9
    ),
    reach=st.integers(0, 3),
    budget=st.integers(1, 40),
    host_blocks=st.sampled_from([0, 8]),
)
def test_only_culprits_end_and_cost_a_bounded_amount_of_work(
    prompts: list[list[int]], reach: int, budget: int, host_blocks: int
) -> None:
    executed, runner = poisonous(host_blocks=host_blocks)
    runner.reach = reach
    for number, prompt in enumerate(prompts):
        executed.add_tokens(number, prompt, max_tokens=6)
    for _ in range(2_000):
        if not executed.scheduler.has_work:
            break
        executed.step(budget, transfer_blocks=4)
    assert executed.ends.keys() == executed.sequences.keys()
    for number, sequence in executed.sequences.items():
        assert executed.ends[number] is (BAD if is_poisonous(sequence) else LENGTH)
        if not is_poisonous(sequence):
            assert generated(sequence) == alone(prompts[number], 6)
    culprits = [len(prompt) for prompt in prompts if POISON in prompt]
    if not reach:  # four halvings find one of nine
        assert runner.num_poisoned <= (3 + 4 * (len(culprits) > 1)) * sum(culprits)
    executed.pool.clear()
    executed.runner.apply(executed.pool.cache.ops.take())
    assert executed.runner.is_empty()
