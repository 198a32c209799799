"""A client counts as gone when nobody listens to two chunks, two seconds apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.streams.liveness import PROBE_AFTER_S, RECONNECT_GRACE_S, ClientLiveness


def test_a_client_without_responders_is_probed_after_two_seconds_and_gone_without_an_answer() -> None:
    liveness = ClientLiveness()
    liveness.no_responders("a", 10.0)
    liveness.no_responders("a", 11.0)
    assert liveness.due_probes(10.0 + PROBE_AFTER_S - 0.01) == []
    assert liveness.due_probes(10.0 + PROBE_AFTER_S) == ["a"]
    assert liveness.due_probes(13.0) == []
    assert liveness.probe_no_responders("a", 13.0)


def test_a_probe_without_a_notice_has_arrived() -> None:
    liveness = ClientLiveness()
    liveness.no_responders("a", 0.0)
    liveness.due_probes(2.0)
    assert liveness.due_probes(4.0) == []
    assert not liveness.probe_no_responders("a", 4.0)
    liveness.no_responders("a", 5.0)
    assert liveness.due_probes(7.0) == ["a"]


def test_late_notices_of_ordinary_chunks_do_not_count_as_those_of_the_probe() -> None:
    liveness = ClientLiveness()
    liveness.no_responders("a", 0.0)
    liveness.due_probes(2.0)
    liveness.no_responders("a", 2.0)
    assert liveness.due_probes(3.9) == []


def test_without_a_probe_nobody_is_gone() -> None:
    liveness = ClientLiveness()
    assert not liveness.probe_no_responders("a", 0.0)
    liveness.no_responders("a", 0.0)
    assert not liveness.probe_no_responders("a", 1.0)


def test_a_client_that_shows_that_it_is_alive_is_not_probed() -> None:
    liveness = ClientLiveness()
    liveness.no_responders("a", 0.0)
    liveness.forget("a")
    assert liveness.due_probes(9.0) == []


@pytest.mark.parametrize(("after_s", "counts"), [(RECONNECT_GRACE_S - 0.01, False), (RECONNECT_GRACE_S, True)])
def test_after_the_frontends_own_reconnect_notices_do_not_count_for_ten_seconds(after_s: float, counts: bool) -> None:
    liveness = ClientLiveness()
    liveness.no_responders("a", 0.0)
    liveness.due_probes(2.0)
    liveness.no_responders("b", 2.0)
    liveness.reconnected(2.0)
    assert not liveness.probe_no_responders("a", 2.1)
    liveness.no_responders("c", 2.0 + after_s)
    assert liveness.due_probes(100.0) == (["c"] if counts else [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["no_responders", "probe_no_responders", "due_probes", "forget", "reconnected"]),
            st.sampled_from("abc"),
        )
    )
)
def test_no_client_is_ever_both_waiting_for_its_probe_and_probed(history: list[tuple[str, str]]) -> None:
    liveness = ClientLiveness()
    for number, (event, key) in enumerate(history):
        now = number * 0.7
        match event:
            case "due_probes" | "reconnected":
                getattr(liveness, event)(now)
            case "forget":
                liveness.forget(key)
            case _:
                getattr(liveness, event)(key, now)
        liveness.check_integrity()
