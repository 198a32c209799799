"""A silent stream is asked for, and given up in a bounded time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.client.wire.resync_timer import Action, ResyncTimer

RESYNC, LOST, WAIT = Action.RESYNC, Action.LOST, Action.WAIT


def steps(timer: ResyncTimer, *times: float) -> list[Action]:
    return [timer.poll(at) for at in times]


@pytest.mark.parametrize(("streamed", "first_s"), [(True, 3.0), (False, 10.0)])
def test_a_stream_that_never_spoke_is_asked_for_twice_and_given_up(streamed: bool, first_s: float) -> None:
    timer = ResyncTimer(0.0, streamed=streamed)
    times = (first_s - 0.01, first_s, first_s + 0.99, first_s + 1, first_s + 1.99, first_s + 2)
    assert steps(timer, *times) == [WAIT, RESYNC, WAIT, RESYNC, WAIT, LOST]


def test_after_the_first_message_silence_may_last_ten_seconds() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    timer.chunk_received(2.0)
    assert steps(timer, 11.9, 12.0, 13.0, 14.0) == [WAIT, RESYNC, RESYNC, LOST]


def test_an_answer_buys_another_ten_seconds() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    assert steps(timer, 3.0, 4.0) == [RESYNC, RESYNC]
    timer.resync_answered(4.5)
    assert steps(timer, 14.4, 14.5, 15.5, 16.5) == [WAIT, RESYNC, RESYNC, LOST]


def test_answers_that_no_message_follows_three_times_in_a_row_are_nobodys() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    for at in (3.0, 13.0, 23.0):
        assert steps(timer, at) == [RESYNC]
        timer.resync_answered(at)
    assert steps(timer, 32.9, 33.0) == [WAIT, LOST]


def test_one_message_between_answers_makes_them_count_from_the_beginning() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    for at in (3.0, 13.0, 23.0, 33.0):
        assert steps(timer, at) == [RESYNC]
        timer.resync_answered(at)
        if at == 13.0:
            timer.chunk_received(13.0)
    assert steps(timer, 43.0) == [RESYNC]


def test_a_whole_answer_may_take_as_long_as_somebody_holds_it() -> None:
    timer = ResyncTimer(0.0, streamed=False)
    for at in range(10, 1_000, 10):
        assert steps(timer, at) == [RESYNC]
        timer.resync_answered(at)


def test_a_message_while_asking_is_as_good_as_an_answer() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    assert steps(timer, 3.0) == [RESYNC]
    timer.chunk_received(3.5)
    assert steps(timer, 13.4, 13.5) == [WAIT, RESYNC]


def test_a_gap_is_asked_for_at_once_and_again_until_it_is_filled() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    timer.gap_found(1.0)
    assert steps(timer, 1.0, 1.1) == [RESYNC, WAIT]
    timer.resync_answered(1.1)
    assert steps(timer, 1.3, 1.35) == [WAIT, RESYNC]
    timer.chunk_received(1.4)
    assert steps(timer, 11.3, 11.4) == [WAIT, RESYNC]


def test_many_chunks_behind_a_gap_do_not_make_many_questions() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    asked = 0
    for millisecond in range(1_000):
        timer.gap_found(1 + millisecond / 1_000)
        asked += timer.poll(1 + millisecond / 1_000) is RESYNC
        timer.resync_answered(1 + millisecond / 1_000)
    assert asked == 4


def test_a_gap_that_is_never_filled_ends_the_stream() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    timer.gap_found(0.0)
    now, last = 0.0, WAIT
    while last is not LOST:
        last = timer.poll(now)
        timer.resync_answered(now)
        now += 0.05
        assert now < 12
    assert now > 10


def test_a_doubt_asks_at_once_but_not_again_at_once() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    timer.chunk_received(0.0)
    timer.resync_soon(1.0)
    assert steps(timer, 1.0, 1.0) == [RESYNC, WAIT]
    timer.resync_soon(1.1)
    assert steps(timer, 1.1, 1.25) == [WAIT, RESYNC]


def test_time_in_which_the_client_stood_still_does_not_count() -> None:
    timer = ResyncTimer(0.0, streamed=True)
    timer.extend(30.0)
    assert steps(timer, 32.9, 33.0) == [WAIT, RESYNC]


@given(
    st.lists(st.sampled_from(["chunk_received", "gap_found", "resync_answered", "resync_soon", "tick"]), max_size=60)
)
def test_whatever_happens_a_stream_that_falls_silent_is_given_up_in_a_bounded_time(history: list[str]) -> None:
    timer = ResyncTimer(0.0, streamed=True)
    now = 0.0
    for event in history:
        now += 0.3
        if event == "tick":
            timer.poll(now)
        else:
            getattr(timer, event)(now)
    silent_since = now
    while timer.poll(now) is not LOST:
        now += 0.1
        assert now - silent_since < 13
