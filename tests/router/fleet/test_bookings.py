"""A booking counts as load until the worker's own events count it."""

import pytest

from tests.router.builders import LOAD_OF_3, at, card, events, fleet_of, known
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.updates import FleetUpdate
from tokenbus.router.placement.placement import PlacementRequest


def test_a_card_of_the_same_incarnation_keeps_load_bookings_and_event_log() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=4, load=LOAD_OF_3), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.apply_card(card(), 0.5)
    assert known(fleet).num_requests == 4
    assert fleet.apply_events("demo", events(seq=4, load=messages.Load()), 0.5) == FleetUpdate()
    assert known(fleet).num_requests == 4


def test_a_booking_counts_until_an_event_confirms_it() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.book(at("w1"), PlacementRequest("b", 1), 0.0)
    assert known(fleet).num_requests == 2
    fleet.apply_events("demo", events(seq=0, load=messages.Load(running=1), started=("a",)), 0.0)
    assert known(fleet).num_requests == 2
    fleet.apply_events("demo", events(seq=1, load=messages.Load(), finished=("a", "b")), 0.0)
    assert known(fleet).num_requests == 0


def test_a_booking_that_is_taken_back_no_longer_counts() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    for _ in range(2):
        fleet.unbook(at("w1"), "a")
        assert known(fleet).num_requests == 0
    fleet.unbook(at("nobody"), "a")


@pytest.mark.parametrize(("age_s", "num_requests"), [(4.999, 1), (5.0, 0)])
def test_a_booking_that_no_event_confirms_expires_after_five_seconds(age_s: float, num_requests: int) -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.sweep(age_s)
    assert known(fleet).num_requests == num_requests


def test_booking_the_same_request_twice_counts_once() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 1.0)
    assert known(fleet).num_requests == 1
