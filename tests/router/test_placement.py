"""A request goes to the worker with the lowest cost, and nobody is favoured by an order of tables."""

import random
from collections import Counter

import pytest

from protocol import messages
from router.fleet import Fleet, Worker
from router.placement import POLICIES, LeastLoaded, NoWorker, Placement, Policy, RoundRobin, make_policies, place
from tests.router.beliefs import card, events


def fleet_of(*max_num_seqs: int) -> Fleet:
    """Workers w0, w1 and so on, with so many places each."""
    fleet = Fleet(began_at=0.0)
    for number, places in enumerate(max_num_seqs):
        fleet.take_card(card(f"w{number}", max_num_seqs=places), 0.0)
    return fleet


def placed(fleet: Fleet, policy: Policy, rng: random.Random) -> str:
    """Places one request as a router does: with its booking, in one step."""
    placement = place(fleet.candidates("demo", 0.0), policy, rng)
    assert isinstance(placement, Placement)
    name = placement.worker.card.worker_id
    fleet.book(name, f"r{rng.getrandbits(64)}", 0.0)
    return name


def requests_at(fleet: Fleet) -> list[int]:
    return [worker.num_requests for worker in fleet.of_model("demo")]


@pytest.mark.parametrize("name", POLICIES)
def test_where_there_is_nobody_there_is_no_placement(name: str) -> None:
    assert place([], make_policies()[name], random.Random(1)) == NoWorker()


@pytest.mark.parametrize("name", POLICIES)
def test_the_only_worker_is_chosen_and_the_policy_named(name: str) -> None:
    fleet = fleet_of(8)
    placement = place(fleet.candidates("demo", 0.0), make_policies()[name], random.Random(1))
    assert placement == Placement(fleet.candidates("demo", 0.0)[0], name)


def test_there_is_one_policy_of_each_name() -> None:
    assert {name: policy.name for name, policy in make_policies().items()} == {name: name for name in POLICIES}


def test_the_worker_with_the_lowest_cost_wins_whatever_is_drawn() -> None:
    fleet = fleet_of(8, 8, 8)
    for number, running in enumerate((3, 1, 2)):
        fleet.take_events(events(f"w{number}", load=messages.Load(running=running)), 0.0)
    for seed in range(20):
        placement = place(fleet.candidates("demo", 0.0), LeastLoaded(), random.Random(seed))
        assert isinstance(placement, Placement)
        assert placement.worker.card.worker_id == "w1"


def test_waiting_requests_weigh_as_much_as_running_ones() -> None:
    fleet = fleet_of(8, 8)
    fleet.take_events(events("w0", load=messages.Load(running=1, waiting=2)), 0.0)
    fleet.take_events(events("w1", load=messages.Load(running=2)), 0.0)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


def test_a_larger_worker_is_given_more_in_proportion() -> None:
    fleet = fleet_of(4, 12)
    rng = random.Random(1)
    for _ in range(16):
        placed(fleet, LeastLoaded(), rng)
    assert requests_at(fleet) == [4, 12]


def test_ties_are_drawn_evenly() -> None:
    workers = fleet_of(8, 8, 8, 8).candidates("demo", 0.0)
    rng = random.Random(42)
    drawn: Counter[str] = Counter()
    for _ in range(4_000):
        placement = place(workers, LeastLoaded(), rng)
        assert isinstance(placement, Placement)
        drawn[placement.worker.card.worker_id] += 1
    assert len(drawn) == 4
    assert all(900 < count < 1_100 for count in drawn.values()), drawn


def test_only_the_cheapest_take_part_in_the_draw() -> None:
    fleet = fleet_of(8, 8, 8)
    fleet.take_events(events("w1", load=messages.Load(running=1)), 0.0)
    chosen = {
        placement.worker.card.worker_id
        for seed in range(50)
        if isinstance(placement := place(fleet.candidates("demo", 0.0), LeastLoaded(), random.Random(seed)), Placement)
    }
    assert chosen == {"w0", "w2"}


def test_a_burst_spreads_evenly_before_any_worker_has_reported() -> None:
    fleet = fleet_of(8, 8, 8, 8)
    rng = random.Random(3)
    for count in range(1, 33):
        placed(fleet, LeastLoaded(), rng)
        assert max(requests_at(fleet)) - min(requests_at(fleet)) <= 1, count
    assert requests_at(fleet) == [8, 8, 8, 8]


def test_a_booking_taken_back_makes_its_worker_cheap_again() -> None:
    fleet = fleet_of(8, 8)
    fleet.book("w0", "a", 0.0)
    fleet.book("w1", "b", 0.0)
    fleet.unbook("w1", "b")
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


def test_a_worker_that_may_take_no_work_is_not_chosen_however_cheap() -> None:
    fleet = fleet_of(8, 8, 8)
    fleet.take_events(events("w0", load=messages.Load(running=7)), 0.0)
    fleet.take_events(events("w1", state=messages.WorkerState.DRAINING), 0.0)
    fleet.take_events(events("w2", load=messages.Load(step_age_ms=2_001.0)), 0.0)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w0"


def test_a_round_robin_gives_everyone_a_turn_before_anyone_has_a_second() -> None:
    fleet = fleet_of(1, 8, 64)
    policy, rng = RoundRobin(), random.Random(5)
    turns = [placed(fleet, policy, rng) for _ in range(12)]
    assert sorted(turns[:3]) == ["w0", "w1", "w2"]
    assert turns == turns[:3] * 4


def test_a_round_robin_gives_a_newcomer_its_turn_next() -> None:
    fleet = fleet_of(8, 8)
    policy, rng = RoundRobin(), random.Random(5)
    for _ in range(5):
        placed(fleet, policy, rng)
    fleet.take_card(card("new"), 0.0)
    assert placed(fleet, policy, rng) == "new"
    assert sorted(placed(fleet, policy, rng) for _ in range(3)) == ["new", "w0", "w1"]


def test_a_round_robin_passes_over_those_that_may_take_nothing() -> None:
    fleet = fleet_of(8, 8, 8)
    policy, rng = RoundRobin(), random.Random(5)
    for _ in range(3):
        placed(fleet, policy, rng)
    fleet.take_events(events("w1", state=messages.WorkerState.RESTARTING), 0.0)
    assert {placed(fleet, policy, rng) for _ in range(4)} == {"w0", "w2"}


def test_a_worker_that_says_it_has_no_places_does_not_end_placement_for_the_others() -> None:
    """Whatever a card says, the other workers of the model are still served."""
    fleet = fleet_of(0, 8)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


def test_placing_changes_nothing_but_the_policys_turns() -> None:
    fleet = fleet_of(8, 8)
    candidates: list[Worker] = fleet.candidates("demo", 0.0)
    for policy in make_policies().values():
        place(candidates, policy, random.Random(1))
    assert requests_at(fleet) == [0, 0]
    fleet.check_integrity()
