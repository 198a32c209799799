"""A booking counts as load until the worker's own events count it."""

import pytest

from tests.router.builders import LOAD_OF_3, at, card, events, fleet_of, known
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.fleet import FleetUpdate
from tokenbus.router.placement.placement import Capacity, PlacementRequest

BLOCKS = {"kv_block_size": 16, "total_kv_blocks": 100, "max_num_seqs": 64}


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


@pytest.mark.parametrize(("expected_blocks", "capacity"), [(99, Capacity.AVAILABLE), (100, Capacity.BUSY)])
def test_a_worker_is_full_once_its_requests_are_expected_to_use_all_its_memory(
    expected_blocks: int, capacity: Capacity
) -> None:
    fleet = fleet_of(card(**BLOCKS))
    load = messages.Load(running=4, used_blocks=50, expected_blocks=expected_blocks)
    fleet.apply_events("demo", events(seq=0, load=load), 0.0)
    assert fleet.model("demo").capacity(0.0) is capacity


def test_a_worker_that_does_not_say_what_it_expects_is_full_once_all_its_blocks_are_used() -> None:
    fleet = fleet_of(card(**BLOCKS))
    for seq, (used_blocks, capacity) in enumerate(((99, Capacity.AVAILABLE), (100, Capacity.BUSY))):
        fleet.apply_events("demo", events(seq=seq, load=messages.Load(running=1, used_blocks=used_blocks)), 0.0)
        assert fleet.model("demo").capacity(0.0) is capacity


def test_a_booking_takes_memory_for_its_prompt_and_its_expected_answer_until_an_event_counts_it() -> None:
    fleet = fleet_of(card(**BLOCKS))
    load = messages.Load(running=1, used_blocks=50, expected_blocks=90)
    fleet.apply_events("demo", events(seq=0, load=load), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 100, answer_tokens=44), 0.0)
    assert fleet.model("demo").capacity(0.0) is Capacity.AVAILABLE
    fleet.book(at("w1"), PlacementRequest("b", 1), 0.0)
    assert fleet.model("demo").capacity(0.0) is Capacity.BUSY
    fleet.apply_events("demo", events(seq=1, load=load, started=("a", "b")), 0.0)
    assert fleet.model("demo").capacity(0.0) is Capacity.AVAILABLE


def test_a_worker_without_blocks_is_full_only_by_the_number_of_its_requests() -> None:
    fleet = fleet_of(card(max_num_seqs=8))
    for seq, (running, capacity) in enumerate(((8, Capacity.AVAILABLE), (9, Capacity.BUSY))):
        fleet.apply_events("demo", events(seq=seq, load=messages.Load(running=running)), 0.0)
        assert fleet.model("demo").capacity(0.0) is capacity


def test_a_worker_that_shares_its_memory_is_full_with_what_it_can_run_now() -> None:
    fleet = fleet_of(card(max_num_seqs=8))
    loads = (
        (messages.Load(running=4, max_running=4), Capacity.AVAILABLE),
        (messages.Load(running=5, max_running=4), Capacity.BUSY),
        (messages.Load(running=5, max_running=8), Capacity.AVAILABLE),
        (messages.Load(running=9, max_running=64), Capacity.BUSY),
    )
    for seq, (load, capacity) in enumerate(loads):
        fleet.apply_events("demo", events(seq=seq, load=load), 0.0)
        assert fleet.model("demo").capacity(0.0) is capacity


def test_a_completion_is_expected_to_have_what_the_workers_say_and_no_more_than_its_limit() -> None:
    fleet = fleet_of(card())
    assert [fleet.model("demo").expected_answer_tokens(most) for most in (None, 10, 5_000)] == [256, 10, 256]
    fleet.apply_events("demo", events(seq=0, load=messages.Load(expected_answer_tokens=900)), 0.0)
    assert [fleet.model("demo").expected_answer_tokens(most) for most in (None, 10, 5_000)] == [900, 10, 900]
