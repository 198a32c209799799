"""A step is stuck when it is older than the limit and than ten of the longest steps so far."""

import pytest

from tokenbus.worker.engine_client.engine_faults import StepWatchdog


@pytest.mark.parametrize(("age_s", "is_stuck"), [(29.9, False), (30.0, False), (30.1, True)])
def test_the_first_step_may_take_as_long_as_the_limit(age_s: float, is_stuck: bool) -> None:
    watchdog = StepWatchdog(now=100.0)
    assert watchdog.age_s(100.0 + age_s) == pytest.approx(age_s)
    assert watchdog.is_stuck(100.0 + age_s, timeout_s=30.0) is is_stuck


def test_where_steps_take_long_a_stuck_one_takes_ten_times_as_long() -> None:
    watchdog = StepWatchdog(now=0.0)
    watchdog.step_reported(4.0, has_outputs=True)
    watchdog.step_reported(9.0, has_outputs=False)
    watchdog.step_reported(11.0, has_outputs=True)
    assert watchdog.longest_step_s == 4.0
    assert not watchdog.is_stuck(11.0 + 40.0, timeout_s=30.0)
    assert watchdog.is_stuck(11.0 + 40.1, timeout_s=30.0)


def test_a_restart_forgets_the_age_of_the_step() -> None:
    watchdog = StepWatchdog(now=0.0)
    watchdog.restart(50.0)
    assert watchdog.age_s(51.0) == 1.0
    assert not watchdog.is_stuck(80.0, timeout_s=30.0)
