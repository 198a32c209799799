import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.telemetry.long_waits import BackoffTimer


def test_a_wait_is_mentioned_when_it_is_long_and_each_time_it_has_doubled() -> None:
    wait = BackoffTimer(5.0)
    assert [at for at in range(60) if wait.is_due(float(at))] == [5, 10, 20, 40]


def test_who_looks_late_says_it_once() -> None:
    wait = BackoffTimer(5.0)
    assert wait.is_due(33.0)
    assert not wait.is_due(39.9)
    assert wait.is_due(40.0)


@given(st.floats(0.05, 10), st.lists(st.floats(0, 1e6), max_size=200))
def test_lines_are_few_however_often_one_looks(first_s: float, looks: list[float]) -> None:
    wait = BackoffTimer(first_s)
    said = [at for at in sorted(looks) if wait.is_due(at)]
    assert all(at >= first_s for at in said)
    assert all(after >= before for before, after in zip(said, said[1:], strict=False))
    assert len(said) <= 26, "log2(1e6 / 0.05) and one"


@pytest.mark.parametrize("first_s", [0.0, -1.0])
def test_a_wait_without_length_is_a_bug(first_s: float) -> None:
    with pytest.raises(AssertionError):
        BackoffTimer(first_s)
