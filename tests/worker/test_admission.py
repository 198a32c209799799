"""How many requests an engine holds, and what is said of those beyond."""

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine_client.admission import CapacityLimit


def test_as_many_are_held_as_run_and_may_wait_and_not_one_more() -> None:
    capacity = CapacityLimit(max_waiting=2)
    capacity.check(held=5, max_num_seqs=4)
    with pytest.raises(errors.RequestError) as caught:
        capacity.check(held=6, max_num_seqs=4)
    assert caught.value.error.code is errors.Code.OVERLOADED


def test_a_bound_that_was_lowered_meanwhile_refuses_the_next() -> None:
    capacity = CapacityLimit(max_waiting=2)
    capacity.max_waiting = 0
    with pytest.raises(errors.RequestError):
        capacity.check(held=4, max_num_seqs=4)


def test_who_is_refused_is_told_to_wait_as_long_as_requests_take_lately() -> None:
    capacity = CapacityLimit(max_waiting=0)
    for _ in range(100):
        capacity.request_ended(8.0)
    with pytest.raises(errors.RequestError) as caught:
        capacity.check(held=4, max_num_seqs=4)
    assert caught.value.error.retry_after_ms == pytest.approx(8_000 * 5 / 4, rel=0.01)
