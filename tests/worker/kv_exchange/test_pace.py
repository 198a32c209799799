"""Blocks move no faster than the pace, after a short burst."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.kv_exchange.pace import Pace


@given(st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 0.05)), min_size=1, max_size=60))
def test_what_has_moved_by_any_time_is_the_pace_times_the_time_and_a_burst(moves: list[tuple[int, float]]) -> None:
    pace, now, moved = Pace(1_000_000.0), 0.0, 0
    for num_bytes, wait_s in moves:
        now += wait_s
        at = now + pace.delay_s(num_bytes, now)
        assert moved <= 1_000_000 * (at + 0.05) + 1
        moved += num_bytes


def test_after_a_pause_there_is_no_more_than_one_burst() -> None:
    pace = Pace(1_000.0)
    assert pace.delay_s(1_000, 100.0) == 0
    assert pace.delay_s(1, 100.0) == pytest.approx(0.95)
