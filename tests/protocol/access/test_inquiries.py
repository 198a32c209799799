"""What those who only look may cost a router."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.access.inquiries import (
    CALLER_BURST_S,
    CALLER_SHARE,
    LEAST_S,
    MAX_CALLERS,
    TOTAL_BURST_S,
    TOTAL_SHARE,
    Inquiries,
    caller_of,
)
from tokenbus.protocol.wire import errors, subjects


def asks(inquiries: Inquiries, caller: str, cost_s: float, now: float) -> float:
    """Returns the seconds after which to ask again; 0 if it was answered."""
    if (refusal := inquiries.refusal(caller, now)) is not None:
        assert refusal.code is errors.Code.OVERLOADED
        assert refusal.retry_after_ms is not None
        return refusal.retry_after_ms / 1e3
    inquiries.pay(caller, cost_s, now)
    return 0.0


def test_a_caller_that_asks_without_end_gets_its_share_of_a_core_and_another_is_answered() -> None:
    inquiries, taken_s = Inquiries("this router"), 0.0
    for number in range(10_000):
        taken_s += 0.005 * (asks(inquiries, "greedy", 0.005, number / 1e3) == 0.0)
        if number % 1_000 == 0:
            assert asks(inquiries, "modest", 0.005, number / 1e3) == 0.0
    assert taken_s == pytest.approx(10 * CALLER_SHARE + CALLER_BURST_S, abs=0.01)


def test_many_callers_together_get_no_more_than_a_share_of_a_core() -> None:
    inquiries, taken_s = Inquiries("this router"), 0.0
    for number in range(20_000):
        taken_s += 0.002 * (asks(inquiries, f"caller {number}", 0.002, number / 1e3) == 0.0)
    assert taken_s == pytest.approx(20 * TOTAL_SHARE + TOTAL_BURST_S, abs=0.01)
    assert len(inquiries._callers) <= MAX_CALLERS


@given(costs=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_who_waits_as_long_as_it_was_told_is_answered(costs: list[float]) -> None:
    inquiries, now = Inquiries("this router"), 0.0
    for cost_s in costs:
        if (wait_s := asks(inquiries, "a", cost_s, now)) > 0.0:
            now += wait_s
            assert asks(inquiries, "a", cost_s, now) == 0.0


def test_answers_that_cost_nothing_count_nevertheless() -> None:
    inquiries = Inquiries("this router")
    answered = sum(asks(inquiries, "a", 0.0, 0.0) == 0.0 for _ in range(10_000))
    assert answered == pytest.approx(CALLER_BURST_S / LEAST_S, abs=2)


@pytest.mark.parametrize(
    ("key_id", "reply", "caller"),
    [
        ("k1", "_INBOX_gateway.abc.1", "key k1"),
        ("", "_INBOX.abc.1", "acme _INBOX.abc"),
        ("", "_INBOX.abc.2.x", "acme _INBOX.abc"),
        ("", "_INBOX.def", "acme _INBOX.def"),
    ],
)
def test_a_caller_is_a_key_or_else_a_connection(key_id: str, reply: str, caller: str) -> None:
    assert caller_of(subjects.ModelAddress("", "acme", key_id), reply) == caller
