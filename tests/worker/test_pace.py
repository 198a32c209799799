"""The pace keeps a step as short as it should be, within its limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.pace import Pace


def pace(target_s: float = 0.1, min_tokens: int = 32, max_tokens: int = 1_000) -> Pace:
    return Pace(target_s, min_tokens=min_tokens, max_tokens=max_tokens)


def test_before_anything_was_timed_a_step_carries_the_fewest_tokens() -> None:
    assert pace().prefill_budget == 32


def test_the_first_timed_step_sets_the_budget_to_what_takes_the_target() -> None:
    one = pace(target_s=0.1)
    one.observe(100, 0.05)
    assert one.prefill_budget == 200


@pytest.mark.parametrize(("rate", "budget"), [(319, 32), (320, 32), (330, 33), (10_000, 1_000), (10_010, 1_000)])
def test_the_budget_stays_within_its_limits(rate: int, budget: int) -> None:
    one = pace(target_s=0.1)
    one.observe(rate, 1.0)
    assert one.prefill_budget == budget


def test_a_change_of_speed_is_followed_by_three_tenths_of_the_difference() -> None:
    one = pace(target_s=1.0)
    one.observe(100, 1.0)
    one.observe(200, 1.0)
    assert one.prefill_budget == 130


def test_after_a_dozen_steps_a_new_speed_is_learned() -> None:
    one = pace(target_s=1.0)
    one.observe(900, 1.0)
    for _ in range(12):
        one.observe(100, 1.0)
    assert one.prefill_budget in range(100, 115)


def test_seven_tokens_teach_nothing_and_eight_do() -> None:
    one = pace(target_s=1.0)
    one.observe(7, 0.01)
    assert one.prefill_budget == 32
    one.observe(8, 0.01)
    assert one.prefill_budget == 800


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_that_took_no_time_teaches_nothing(seconds: float) -> None:
    one = pace()
    one.observe(100, seconds)
    assert one.prefill_budget == 32


@pytest.mark.parametrize(("least", "most"), [(0, 10), (11, 10)])
def test_limits_that_leave_no_budget_are_refused(least: int, most: int) -> None:
    with pytest.raises(AssertionError):
        pace(min_tokens=least, max_tokens=most)


@given(
    steps=st.lists(st.tuples(st.integers(0, 4_096), st.integers(0, 10**11)), max_size=30),
    limits=st.tuples(st.integers(1, 100), st.integers(0, 2_000)),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_observed_the_budget_is_within_its_limits(
    steps: list[tuple[int, int]], limits: tuple[int, int]
) -> None:
    least, more = limits
    one = pace(min_tokens=least, max_tokens=least + more)
    for num_tokens, nanoseconds in steps:
        one.observe(num_tokens, nanoseconds / 1e9)
        assert least <= one.prefill_budget <= least + more
