"""An engine holds so many requests and no more, and tells those beyond when to try again."""

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine_client.admission import CapacityLimit


def test_as_many_requests_are_held_as_may_run_and_wait_and_no_more() -> None:
    capacity = CapacityLimit(max_waiting=2)
    capacity.check(held=5, max_num_seqs=4)
    with pytest.raises(errors.RequestError) as caught:
        capacity.check(held=6, max_num_seqs=4)
    assert caught.value.error.code is errors.Code.OVERLOADED


def test_a_limit_that_was_lowered_refuses_the_next_request() -> None:
    capacity = CapacityLimit(max_waiting=2)
    capacity.max_waiting = 0
    with pytest.raises(errors.RequestError):
        capacity.check(held=4, max_num_seqs=4)


def test_a_refusal_names_a_wait_that_follows_the_duration_of_recent_requests() -> None:
    capacity = CapacityLimit(max_waiting=0)
    for _ in range(100):
        capacity.request_ended(8.0)
    with pytest.raises(errors.RequestError) as caught:
        capacity.check(held=4, max_num_seqs=4)
    assert caught.value.error.retry_after_ms == pytest.approx(8_000 * 5 / 4, rel=0.01)
