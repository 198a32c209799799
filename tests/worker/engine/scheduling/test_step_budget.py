"""The step budget keeps a step as short as it should be, within its limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.scheduling.step_budget import StepBudget, TransferBudget


def budget_of(
    target_s: float = 0.1, min_tokens: int = 32, max_tokens: int = 1_000, *, tile_rows: int = 1
) -> StepBudget:
    return StepBudget(target_s, min_tokens=min_tokens, max_tokens=max_tokens, tile_rows=tile_rows)


def test_before_anything_was_timed_a_step_carries_the_fewest_tokens() -> None:
    assert budget_of().prefill_tokens(num_decoding=0) == 32
    assert budget_of().prefill_tokens(num_decoding=5) == 32


def test_the_first_timed_step_sets_the_budget_to_what_takes_the_target_together_with_those_that_decode() -> None:
    one = budget_of(target_s=0.1)
    one.observe(100, 0.05)
    assert [one.prefill_tokens(num_decoding) for num_decoding in (1, 2, 50)] == [199, 198, 150]


def test_while_nobody_decodes_a_step_may_take_three_times_as_long() -> None:
    one = budget_of(target_s=0.1)
    one.observe(100, 0.05)
    assert one.prefill_tokens(num_decoding=0) == 600


@pytest.mark.parametrize(("rate", "budget"), [(310, 32), (670, 66), (10_010, 1_000), (10_020, 1_000)])
def test_the_budget_stays_within_its_limits(rate: int, budget: int) -> None:
    one = budget_of(target_s=0.1)
    one.observe(rate, 1.0)
    assert one.prefill_tokens(num_decoding=1) == budget


@pytest.mark.parametrize(
    ("rate", "budget"), [(319, 32), (320, 64), (900, 64), (1_010, 128), (1_600, 128), (1_650, 192), (20_000, 1_000)]
)
def test_a_step_has_whole_tiles_if_one_takes_at_most_twice_the_target(rate: int, budget: int) -> None:
    one = budget_of(target_s=0.1, tile_rows=64)
    one.observe(rate, 1.0)
    assert one.prefill_tokens(num_decoding=4) == budget


def test_many_streams_leave_a_prompt_a_whole_tile() -> None:
    one = budget_of(target_s=0.1, tile_rows=64)
    one.observe(700, 1.0)
    assert one.prefill_tokens(num_decoding=90) == 64


def test_a_change_of_speed_is_followed_by_three_tenths_of_the_difference() -> None:
    one = budget_of(target_s=1.0)
    one.observe(100, 1.0)
    one.observe(200, 1.0)
    assert one.prefill_tokens(num_decoding=1) == 130 - 1


def test_after_a_dozen_steps_a_new_speed_is_learned() -> None:
    one = budget_of(target_s=1.0)
    one.observe(900, 1.0)
    for _ in range(12):
        one.observe(100, 1.0)
    assert one.prefill_tokens(num_decoding=1) in range(99, 114)


def test_seven_tokens_teach_nothing_and_eight_do() -> None:
    one = budget_of(target_s=1.0)
    one.observe(7, 0.01)
    assert one.prefill_tokens(num_decoding=1) == 32
    one.observe(8, 0.01)
    assert one.prefill_tokens(num_decoding=1) == 799


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_that_took_no_time_teaches_nothing(seconds: float) -> None:
    one = budget_of()
    one.observe(100, seconds)
    assert one.prefill_tokens(num_decoding=1) == 32


@pytest.mark.parametrize(("least", "most"), [(0, 10), (11, 10)])
def test_limits_that_leave_no_budget_are_refused(least: int, most: int) -> None:
    with pytest.raises(AssertionError):
        budget_of(min_tokens=least, max_tokens=most)


def test_the_budget_shows_how_fast_prompts_are_computed() -> None:
    one = budget_of(target_s=0.1)
    one.observe(1_000, 1.0)
    assert repr(one) == "<StepBudget 1000 tokens/s, 99 a step>"
    assert repr(TransferBudget(1.0)) == "<TransferBudget 16 blocks a step>"


@given(
    steps=st.lists(st.tuples(st.integers(0, 4_096), st.integers(0, 10**11)), max_size=30),
    limits=st.tuples(st.integers(1, 100), st.integers(0, 2_000)),
    num_decoding=st.integers(0, 64),
)
@settings(max_examples=150)
def test_whatever_is_observed_the_budget_is_within_its_limits(
    steps: list[tuple[int, int]], limits: tuple[int, int], num_decoding: int
) -> None:
    least, more = limits
    one = budget_of(min_tokens=least, max_tokens=least + more)
    for num_tokens, nanoseconds in steps:
        one.observe(num_tokens, nanoseconds / 1e9)
        assert least <= one.prefill_tokens(num_decoding) <= least + more


def transfers(*kv_ops: KvOp, seconds: float, target_s: float = 1.0) -> TransferBudget:
    """A transfer budget that has observed these ops together."""
    one = TransferBudget(target_s)
    one.observe(kv_ops, seconds)
    return one


SAVE, RESTORE = Offload(1, 0, 0, 16), Onload(1, 2, 0, 16)


def test_the_first_transfers_are_of_sixteen_blocks() -> None:
    assert TransferBudget(1.0).blocks == 16


def test_as_many_blocks_are_copied_as_take_the_target() -> None:
    assert transfers(SAVE, RESTORE, seconds=0.25).blocks == 8


@pytest.mark.parametrize("seconds", [1.0, 1.5, 100.0])
def test_one_block_is_copied_however_long_it_takes(seconds: float) -> None:
    assert transfers(SAVE, seconds=seconds).blocks == 1


def test_ops_that_copy_nothing_teach_nothing() -> None:
    assert transfers(Share(0, 1, 0, 16), Truncate(0), Discard(1), seconds=5.0).blocks == 16


def test_a_change_of_the_time_for_a_block_is_followed_by_three_tenths_of_the_difference() -> None:
    one = transfers(SAVE, seconds=0.125)
    one.observe([SAVE, Truncate(0), SAVE], 2 * 0.375)
    assert one.blocks == int(1 / (0.125 + 0.3 * 0.25))
