"""An engine holds so many requests and no more, and serves only token ids that its vocabulary has."""

import pytest

from tests.support.arithmetic import make_config
from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine_client import admission
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


@pytest.mark.parametrize(
    ("prompt", "given", "param"),
    [([1, 50], [1], "token_ids[1]"), ([1], [49, 1, 50, 51], "resume_from.token_ids[3]"), ([1], [50], "resume_from")],
)
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(
    prompt: list[int], given: list[int], param: str
) -> None:
    def check(prompt: list[int], given: list[int]) -> None:
        resumed = engine_request.ResumedCompletion(token_ids=given)
        sampling = engine_request.Sampling(max_tokens=9)
        request = engine_request.EngineRequest(key="default:a", token_ids=prompt, sampling=sampling, resumed=resumed)
        admission.check(request, make_config(vocab_size=50))

    check([0, 49], [0, 49])
    with pytest.raises(errors.RequestError) as caught:
        check(prompt, given)
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    assert str(caught.value.error.param).startswith(param)
