"""A frontend may publish only while its own loop runs and the broker answers its pings."""

import pytest

from tokenbus.worker.broker.fence import FENCE_S, Fence


@pytest.mark.parametrize(("silent_s", "holds"), [(FENCE_S - 0.01, True), (FENCE_S, False)])
def test_without_an_answered_ping_for_a_second_and_a_half_it_goes_down(silent_s: float, holds: bool) -> None:
    fence = Fence(10.0)
    for tick in range(10):
        fence.tick(10.0 + tick * silent_s / 10)
    assert fence.check(10.0 + silent_s) is holds


@pytest.mark.parametrize(("still_s", "holds"), [(FENCE_S - 0.01, True), (FENCE_S, False)])
def test_a_loop_that_stood_still_for_as_long_takes_it_down_too(still_s: float, holds: bool) -> None:
    fence = Fence(10.0)
    fence.ping_answered(10.0 + still_s)
    assert fence.check(10.0 + still_s) is holds


def test_a_tick_after_standing_still_does_not_hide_it() -> None:
    fence = Fence(0.0)
    fence.ping_answered(2.0)
    fence.tick(2.0)
    assert not fence.check(2.0)


def test_once_down_it_stays_down_until_it_is_reset() -> None:
    fence = Fence(0.0)
    assert not fence.check(5.0)
    fence.ping_answered(5.0)
    fence.tick(5.0)
    assert not fence.check(5.0)
    fence.reset(6.0)
    assert fence.check(6.0)


def test_the_answer_to_an_earlier_ping_changes_nothing() -> None:
    fence = Fence(0.0)
    fence.ping_answered(1.0)
    fence.ping_answered(0.5)
    fence.tick(1.0)
    assert fence.check(2.4)
