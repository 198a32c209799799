"""A silent worker gets no new work, and is lost when its lease expires."""

import pytest

from tests.router.builders import (
    DRAINING,
    LOAD_OF_3,
    READY,
    RESTARTING,
    STARTING,
    at,
    candidates,
    card,
    events,
    expired,
    fleet_of,
    forget_silent,
    known,
    named,
)
from tokenbus.protocol.wire import messages
from tokenbus.router.placement.placement import Capacity


def test_a_worker_that_publishes_cards_but_no_events_gets_requests_for_one_second_only() -> None:
    fleet = fleet_of(card())
    for said_at in (0.3, 0.6, 0.9, 1.2):
        fleet.apply_card(card(), said_at)
    assert candidates(fleet, 0.9) == ["w1"]
    assert candidates(fleet, 1.2) == []


def test_a_worker_without_responders_gets_no_request_before_its_next_event() -> None:
    fleet = fleet_of(card("w1"), card("w2"))
    fleet.mark_no_responders(card("w1", epoch="99-another"))
    assert candidates(fleet, 0.1) == ["w1", "w2"]
    fleet.mark_no_responders(card("w1"))
    fleet.apply_card(card("w1"), 0.2)
    assert candidates(fleet, 0.3) == ["w2"]
    fleet.apply_events("demo", events("w1"), 0.4)
    assert candidates(fleet, 0.5) == ["w1", "w2"]


@pytest.mark.parametrize(
    ("state", "most", "room"),
    [
        (RESTARTING, 8, Capacity.BUSY),
        (STARTING, 8, Capacity.BUSY),
        (DRAINING, 8, Capacity.NO_WORKERS),
        (READY, 8, Capacity.AVAILABLE),
        (READY, 0, Capacity.NO_WORKERS),
    ],
)
def test_capacity_says_whether_a_worker_may_come_back(state: messages.WorkerState, most: int, room: Capacity) -> None:
    assert fleet_of(card(state=state, max_num_seqs=most)).model("demo").capacity(0.1) is room


def test_a_silent_worker_may_come_back_until_its_lease_expires() -> None:
    fleet = fleet_of(card())
    assert fleet.model("demo").capacity(1.5) is Capacity.BUSY
    fleet.expire_leases(2.0)
    assert fleet.model("demo").capacity(2.0) is Capacity.NO_WORKERS


def test_a_worker_whose_lease_is_renewed_after_it_expired_keeps_its_load() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=0, load=LOAD_OF_3), 0.0)
    assert expired(fleet, 2.0) == ["w1"]
    assert fleet.is_lost(card())
    assert candidates(fleet, 2.0) == []
    fleet.renew_lease(card(), 2.1)
    fleet.remove(card())
    assert not fleet.is_lost(card())
    assert candidates(fleet, 2.2) == ["w1"]
    assert known(fleet).num_requests == 3


@pytest.mark.parametrize(("silent_s", "names"), [(0.999, ["w1"]), (1.0, [])])
def test_a_worker_silent_for_a_second_gets_no_new_work(silent_s: float, names: list[str]) -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, silent_s) == names
    assert fleet.expire_leases(silent_s) == []


@pytest.mark.parametrize(("silent_s", "lost"), [(1.999, []), (2.0, ["w1"])])
def test_a_worker_silent_for_two_seconds_is_lost(silent_s: float, lost: list[str]) -> None:
    fleet = fleet_of(card())
    fleet.apply_card(card("w2"), 1.0)
    assert expired(fleet, silent_s) == lost
    assert expired(fleet, silent_s) == []
    for name in ("w1", "w2"):
        fleet.remove(card(name))
    assert (fleet.find_worker(at("w1")) is None) == bool(lost)
    assert fleet.find_worker(at("w2")) is not None


def test_a_silent_worker_that_publishes_an_event_gets_work_again() -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, 1.5) == []
    fleet.apply_events("demo", events(), 1.5)
    assert candidates(fleet, 2.4) == ["w1"]


def test_a_lost_worker_must_be_discovered_again() -> None:
    fleet = fleet_of(card())
    forget_silent(fleet, 2.0)
    assert fleet.apply_events("demo", events(), 2.0) is None
    fleet.apply_card(card(), 2.0)
    assert candidates(fleet, 2.0) == ["w1"]


def test_silence_while_the_router_was_disconnected_does_not_count() -> None:
    fleet = fleet_of(card(), card("w2"))
    fleet.renew_all_leases(10.0)
    assert fleet.expire_leases(11.999) == []
    assert expired(fleet, 12.0) == ["w1", "w2"]


@pytest.mark.parametrize("state", [STARTING, RESTARTING, DRAINING])
def test_a_worker_in_any_state_but_ready_is_known_and_gets_nothing(state: messages.WorkerState) -> None:
    fleet = fleet_of(card(state=state))
    assert candidates(fleet, 0.0) == []
    assert named(fleet.workers_of("demo")) == ["w1"]
    fleet.apply_events("demo", events(state=READY), 0.0)
    assert candidates(fleet, 0.0) == ["w1"]


@pytest.mark.parametrize(("age_ms", "names"), [(2_000.0, ["w1"]), (2_000.1, [])])
def test_a_worker_whose_step_is_old_gets_nothing(age_ms: float, names: list[str]) -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(load=messages.Load(running=1, step_age_ms=age_ms)), 0.0)
    assert candidates(fleet, 0.0) == names
