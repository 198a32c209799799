"""A stream whose client is out of reach is held until the client can be reached, for a bounded time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.streams.holds import MAX_HELD_TOKENS, RECONNECT_GRACE_S, Holds, Patience

GONE_S, LINK_S = 2.0, 60.0


def holds() -> Holds:
    return Holds(Patience(GONE_S, LINK_S))


def probe(found: Holds, key: str, at: float, *, reaches: bool) -> None:
    """Sends a probe that is due, of which everything is known a moment later."""
    assert key in found.due_probes(at)
    found.probed(key, at)
    if not reaches:
        found.missed(key)
    found.confirmed(at + 0.001)


def is_over(found: Holds, at: float, tokens: int = 0, *, suspect: bool = False) -> bool:
    return found.is_over("a", tokens, at, is_link_suspect=suspect)


def reached_at(found: Holds) -> float | None:
    hold = found.find("a")
    assert hold is not None
    return hold.reached_at


def test_a_client_that_stays_away_is_given_up_after_two_seconds() -> None:
    found = holds()
    found.hold("a", 3, 10.0)
    for at in (10.0, 10.25, 10.5, 11.9):
        probe(found, "a", at, reaches=False)
        assert not is_over(found, at)
    assert is_over(found, 12.0)


def test_while_a_link_may_be_down_nobody_is_given_up_for_a_minute() -> None:
    found = holds()
    found.hold("a", 3, 10.0)
    assert not is_over(found, 69.9, suspect=True)
    assert is_over(found, 70.0, suspect=True)


def test_once_a_link_is_back_a_client_has_its_two_seconds_to_return() -> None:
    found = holds()
    found.hold("a", 3, 10.0)
    assert not is_over(found, 40.0, suspect=True)
    assert not is_over(found, 41.9)
    assert is_over(found, 42.0)


def test_a_probe_without_a_notice_reaches_its_client_only_once_everything_before_it_has_reached_the_broker() -> None:
    found = holds()
    found.hold("a", 3, 10.0)
    found.probed("a", 10.0)
    found.confirmed(9.9)
    assert reached_at(found) is None
    found.confirmed(10.0)
    assert reached_at(found) == 10.0


def test_a_client_that_is_reached_once_and_then_missed_is_away_again() -> None:
    found = holds()
    found.hold("a", 3, 10.0)
    probe(found, "a", 10.0, reaches=True)
    probe(found, "a", 10.25, reaches=True)
    assert reached_at(found) == 10.0, "since the first of them"
    probe(found, "a", 10.5, reaches=False)
    assert reached_at(found) is None


def test_a_guardian_in_doubt_has_to_confirm_after_that_and_its_client_is_not_away() -> None:
    found = holds()
    hold = found.hold("a", 3, 10.0)
    probe(found, "a", 10.0, reaches=True)
    hold.doubt(12.5)
    assert reached_at(found) == 12.5
    assert not is_over(found, 14.4)
    probe(found, "a", 14.5, reaches=False)
    assert not is_over(found, 16.3)
    assert is_over(found, 16.5), "its time began when it was away again"
    found.probed("a", 15.5)
    hold.doubt(15.6)
    assert reached_at(found) is None, "nothing is known of the probe"
    found.confirmed(15.5)
    assert reached_at(found) is None, "a check that was sent before the doubt must not count for it"
    found.confirmed(15.6)
    assert reached_at(found) == 15.6


def test_probes_come_four_times_a_second_at_first_and_then_once_a_second() -> None:
    found, sent = holds(), []
    found.hold("a", 3, 0.0)
    for tick in range(24):
        at = tick * 0.25
        for key in found.due_probes(at):
            found.probed(key, at)
            found.missed(key)
            sent.append(at)
    assert sent == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0, 5.0]


def test_a_link_that_is_back_is_tried_at_once() -> None:
    found = holds()
    found.hold("a", 3, 0.0)
    probe(found, "a", 5.0, reaches=False)
    assert found.due_probes(5.2) == []
    found.hurry(5.2)
    assert found.due_probes(5.2) == ["a"]


def test_a_stream_is_held_once() -> None:
    found = holds()
    hold = found.hold("a", 9, 0.0)
    assert found.hold("a", 9, 0.1) is hold


@pytest.mark.parametrize("suspect", [True, False])
def test_a_stream_that_grows_too_much_while_it_is_held_is_given_up(suspect: bool) -> None:
    found = holds()
    found.hold("a", 100, 0.0)
    assert not is_over(found, 0.1, 100 + MAX_HELD_TOKENS - 1, suspect=suspect)
    assert is_over(found, 0.1, 100 + MAX_HELD_TOKENS, suspect=suspect)


def test_an_inbox_that_answers_every_probe_and_misses_every_chunk_is_given_up_after_a_minute_of_holds() -> None:
    found, now, num_released = holds(), 0.0, 0
    while True:
        found.hold("a", 0, now)
        probe(found, "a", now, reaches=True)
        now += 0.5
        if is_over(found, now, suspect=True):
            break
        found.release("a", 0, now)
        num_released += 1
        found.expire(now)
        now += 0.5
    assert (now, num_released) == (119.5, 119)


def test_a_stream_that_flows_for_a_minute_has_all_its_patience_back() -> None:
    found = holds()
    found.hold("a", 0, 0.0)
    found.release("a", 0, 50.0)
    found.expire(110.0)
    found.hold("a", 0, 110.0)
    assert not is_over(found, 169.9, suspect=True)


def test_a_client_that_gets_one_message_is_sent_it_again_each_second_and_given_up_as_soon_as_others() -> None:
    found, now = holds(), 0.0
    found.hold("a", 0, now, is_blind=True)
    assert found.due_probes(0.9) == []
    assert reached_at(found) is None
    assert found.due_probes(1.0) == []
    assert reached_at(found) == 1.0, "publishing it shows whether the client is there"
    found.release("a", 0, 1.0)
    found.hold("a", 0, 1.01, is_blind=True)
    assert not is_over(found, 1.9)
    assert is_over(found, 2.1)


def test_after_the_frontends_own_reconnect_nothing_is_given_up_and_everything_probed_again() -> None:
    found = holds()
    found.hold("a", 0, 0.0)
    found.probed("a", 0.0)
    found.reconnected(1.0)
    found.confirmed(1.0)
    assert reached_at(found) is None, "the notice may have been lost"
    assert found.due_probes(1.0) == ["a"]
    assert not is_over(found, 1.0 + RECONNECT_GRACE_S - 0.1)
    assert is_over(found, 1.0 + RECONNECT_GRACE_S + GONE_S)


@given(st.lists(st.tuples(st.sampled_from("hprmfcx"), st.floats(0.0, 2.0)), max_size=60))
def test_no_stream_is_held_for_longer_than_a_minute_in_any_history(events: list[tuple[str, float]]) -> None:
    found, now, held_s = holds(), 0.0, 0.0
    for event, pause_s in events:
        before = now
        now += pause_s
        if found.find("a") is not None:
            held_s += now - before
            if is_over(found, now, suspect=True):
                assert held_s >= LINK_S
                found.forget("a")
                held_s = 0.0
                continue
            assert held_s < LINK_S
        match event:
            case "h":
                found.hold("a", 0, now)
            case "p" if "a" in found.due_probes(now):
                found.probed("a", now)
            case "r":
                found.confirmed(now)
            case "m":
                found.missed("a")
            case "f" if found.find("a") is not None:
                found.release("a", 0, now)
            case "c":
                found.reconnected(now)
            case "x":
                found.hurry(now)
