"""The silence rule: when a client asks for its stream, and when it gives it up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.client.patience import Patience, Step

ASK, LOST, WAIT = Step.ASK, Step.LOST, Step.WAIT


def steps(patience: Patience, *times: float) -> list[Step]:
    return [patience.next(at) for at in times]


@pytest.mark.parametrize(("streamed", "first_s"), [(True, 3.0), (False, 10.0)])
def test_a_stream_that_never_spoke_is_asked_for_twice_and_given_up(streamed: bool, first_s: float) -> None:
    patience = Patience(0.0, streamed=streamed)
    times = (first_s - 0.01, first_s, first_s + 0.99, first_s + 1, first_s + 1.99, first_s + 2)
    assert steps(patience, *times) == [WAIT, ASK, WAIT, ASK, WAIT, LOST]


def test_after_the_first_message_silence_may_last_ten_seconds() -> None:
    patience = Patience(0.0, streamed=True)
    patience.heard(2.0)
    assert steps(patience, 11.9, 12.0, 13.0, 14.0) == [WAIT, ASK, ASK, LOST]


def test_an_answer_buys_another_ten_seconds() -> None:
    patience = Patience(0.0, streamed=True)
    assert steps(patience, 3.0, 4.0) == [ASK, ASK]
    patience.found(4.5)
    assert steps(patience, 14.4, 14.5, 15.5, 16.5) == [WAIT, ASK, ASK, LOST]


def test_a_message_while_asking_is_as_good_as_an_answer() -> None:
    patience = Patience(0.0, streamed=True)
    assert steps(patience, 3.0) == [ASK]
    patience.heard(3.5)
    assert steps(patience, 13.4, 13.5) == [WAIT, ASK]


def test_a_gap_is_asked_for_at_once_and_again_until_it_is_filled() -> None:
    patience = Patience(0.0, streamed=True)
    patience.missing(1.0)
    assert steps(patience, 1.0, 1.1) == [ASK, WAIT]
    patience.found(1.1)
    assert steps(patience, 1.3, 1.35) == [WAIT, ASK]
    patience.heard(1.4)
    assert steps(patience, 11.3, 11.4) == [WAIT, ASK]


def test_many_chunks_behind_a_gap_do_not_make_many_questions() -> None:
    patience = Patience(0.0, streamed=True)
    asked = 0
    for millisecond in range(1_000):
        patience.missing(1 + millisecond / 1_000)
        asked += patience.next(1 + millisecond / 1_000) is ASK
        patience.found(1 + millisecond / 1_000)
    assert asked == 4


def test_a_gap_that_is_never_filled_ends_the_stream() -> None:
    patience = Patience(0.0, streamed=True)
    patience.missing(0.0)
    now, last = 0.0, WAIT
    while last is not LOST:
        last = patience.next(now)
        patience.found(now)
        now += 0.05
        assert now < 12
    assert now > 10


def test_a_doubt_asks_at_once_but_not_again_at_once() -> None:
    patience = Patience(0.0, streamed=True)
    patience.heard(0.0)
    patience.doubt(1.0)
    assert steps(patience, 1.0, 1.0) == [ASK, WAIT]
    patience.doubt(1.1)
    assert steps(patience, 1.1, 1.25) == [WAIT, ASK]


def test_time_in_which_the_client_stood_still_does_not_count() -> None:
    patience = Patience(0.0, streamed=True)
    patience.forgive(30.0)
    assert steps(patience, 32.9, 33.0) == [WAIT, ASK]


@given(st.lists(st.sampled_from(["heard", "missing", "found", "doubt", "tick"]), max_size=60))
def test_whatever_happens_a_stream_that_falls_silent_is_given_up_in_a_bounded_time(history: list[str]) -> None:
    patience = Patience(0.0, streamed=True)
    now = 0.0
    for event in history:
        now += 0.3
        if event == "tick":
            patience.next(now)
        else:
            getattr(patience, event)(now)
    silent_since = now
    while patience.next(now) is not LOST:
        now += 0.1
        assert now - silent_since < 13
