"""A client counts as gone when nobody listens to two chunks, two seconds apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.streams.presence import FORGIVE_S, PROBE_AFTER_S, Presence


def test_a_client_that_is_missed_is_probed_after_two_seconds_and_gone_if_it_is_missed_again() -> None:
    presence = Presence()
    presence.missed("a", 10.0)
    presence.missed("a", 11.0)
    assert presence.due(10.0 + PROBE_AFTER_S - 0.01) == []
    assert presence.due(10.0 + PROBE_AFTER_S) == ["a"]
    assert presence.due(13.0) == []
    assert presence.missed_again("a", 13.0)


def test_a_probe_that_nobody_misses_has_arrived() -> None:
    presence = Presence()
    presence.missed("a", 0.0)
    presence.due(2.0)
    assert presence.due(4.0) == []
    assert not presence.missed_again("a", 4.0)
    presence.missed("a", 5.0)
    assert presence.due(7.0) == ["a"]


def test_late_notices_of_ordinary_chunks_do_not_count_as_those_of_the_probe() -> None:
    presence = Presence()
    presence.missed("a", 0.0)
    presence.due(2.0)
    presence.missed("a", 2.0)
    assert presence.due(3.9) == []


def test_without_a_probe_nobody_is_gone() -> None:
    presence = Presence()
    assert not presence.missed_again("a", 0.0)
    presence.missed("a", 0.0)
    assert not presence.missed_again("a", 1.0)


def test_a_client_that_shows_itself_is_not_missed_any_more() -> None:
    presence = Presence()
    presence.missed("a", 0.0)
    presence.forget("a")
    assert presence.due(9.0) == []


@pytest.mark.parametrize(("after_s", "counts"), [(FORGIVE_S - 0.01, False), (FORGIVE_S, True)])
def test_after_the_fronts_own_reconnect_notices_do_not_count_for_ten_seconds(after_s: float, counts: bool) -> None:
    presence = Presence()
    presence.missed("a", 0.0)
    presence.due(2.0)
    presence.missed("b", 2.0)
    presence.reconnected(2.0)
    assert not presence.missed_again("a", 2.1)
    presence.missed("c", 2.0 + after_s)
    assert presence.due(100.0) == (["c"] if counts else [])


@given(
    st.lists(
        st.tuples(st.sampled_from(["missed", "missed_again", "due", "forget", "reconnected"]), st.sampled_from("abc"))
    )
)
def test_whatever_comes_no_client_is_both_waited_for_and_probed(history: list[tuple[str, str]]) -> None:
    presence = Presence()
    for number, (event, key) in enumerate(history):
        now = number * 0.7
        match event:
            case "due" | "reconnected":
                getattr(presence, event)(now)
            case "forget":
                presence.forget(key)
            case _:
                getattr(presence, event)(key, now)
        presence.check_integrity()
