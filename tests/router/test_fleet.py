"""The fleet believes the latest life of each worker, forgets the silent, and says who may be given work."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.router.builders import READY, at, card, events, part
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.registry import MAX_WORKERS
from tokenbus.router.fleet.updates import FleetUpdate, LostWorker
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.placement import Capacity, PlacementRequest

DRAINING, RESTARTING, STARTING, STOPPED = (
    messages.WorkerState.DRAINING,
    messages.WorkerState.RESTARTING,
    messages.WorkerState.STARTING,
    messages.WorkerState.STOPPED,
)
LOAD_OF_3 = messages.Load(running=2, waiting=1)


def fleet_of(*cards: messages.Card, now: float = 0.0) -> Fleet:
    fleet = Fleet(began_at=0.0)
    for one in cards:
        fleet.apply_card(one, now)
    return fleet


def known(fleet: Fleet, worker_id: str = "w1") -> Worker:
    worker = fleet.find(at(worker_id))
    assert worker is not None
    return worker


def named(workers: list[Worker]) -> list[str]:
    return [worker.card.worker_id for worker in workers]


def candidates(fleet: Fleet, now: float, model: str = "demo") -> list[str]:
    """Who may be given a request now."""
    return named(fleet.eligible_workers(model, now))


def lapsed(fleet: Fleet, now: float) -> list[str]:
    return [lost.card.worker_id for lost in fleet.expire_leases(now)]


def forget_silent(fleet: Fleet, now: float) -> None:
    for lost in fleet.expire_leases(now):
        fleet.remove(lost.card, now)


def test_a_card_makes_a_worker_known_and_a_candidate() -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, 0.0) == ["w1"]
    assert candidates(fleet, 0.0, "other") == []
    assert fleet.find(at("w2")) is None


def test_a_card_of_the_same_life_changes_what_is_known_and_proves_no_life() -> None:
    fleet = fleet_of(card())
    assert fleet.apply_card(card(state=DRAINING, features=["chat"]), 1.5) == FleetUpdate()
    assert known(fleet).card.features == ["chat"]
    assert candidates(fleet, 1.5) == []
    assert lapsed(fleet, 2.0) == ["w1"]


def test_a_worker_that_publishes_cards_and_no_event_gets_requests_for_a_second_only() -> None:
    fleet = fleet_of(card())
    for said_at in (0.3, 0.6, 0.9, 1.2):
        fleet.apply_card(card(), said_at)
    assert candidates(fleet, 0.9) == ["w1"]
    assert candidates(fleet, 1.2) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_block_size": 0},
        {"kv_block_size": -1},
        {"kv_block_size": 2**31},
        {"context_length": 0},
        {"context_length": 2**63},
        {"max_num_seqs": -1},
        {"total_kv_blocks": -1},
        {"host_kv_blocks": -1},
    ],
)
def test_a_card_with_a_number_that_can_not_be_is_refused(changes: dict[str, int]) -> None:
    fleet = fleet_of()
    (name,) = changes
    update = fleet.apply_card(card(**changes), 0.0)
    assert update.refused is not None
    assert name in update.refused
    assert list(fleet.models()) == []


def test_a_card_that_is_too_large_is_refused() -> None:
    fleet = fleet_of()
    update = fleet.apply_card(card(features=["generate", "x" * 65_536]), 0.0)
    assert update.refused is not None
    assert "bytes" in update.refused
    assert list(fleet.models()) == []


def test_a_worker_where_nobody_listened_gets_no_request_before_its_next_event() -> None:
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
def test_there_will_be_room_where_a_worker_is_about_to_come_back(
    state: messages.WorkerState, most: int, room: Capacity
) -> None:
    assert fleet_of(card(state=state, max_num_seqs=most)).capacity("demo", 0.1) is room


def test_a_silent_worker_may_come_back_until_it_is_lost() -> None:
    fleet = fleet_of(card())
    assert fleet.capacity("demo", 1.5) is Capacity.BUSY
    fleet.expire_leases(2.0)
    assert fleet.capacity("demo", 2.0) is Capacity.NO_WORKERS


def test_a_card_of_the_same_life_keeps_load_bookings_and_place_in_the_event_log() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=4, load=LOAD_OF_3), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.apply_card(card(), 0.5)
    assert known(fleet).num_requests == 4
    assert fleet.apply_events("demo", events(seq=4, load=messages.Load()), 0.5) == FleetUpdate()
    assert known(fleet).num_requests == 4


def test_a_later_life_takes_over_at_once_and_the_streams_of_the_earlier_are_lost() -> None:
    fleet = fleet_of(card(epoch="100-b"))
    fleet.apply_events("demo", events(epoch="100-b", seq=0, load=LOAD_OF_3), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    assert fleet.apply_card(card(epoch="101-a"), 0.0) == FleetUpdate(
        lost=LostWorker(card(epoch="100-b"), was_behind=False)
    )
    assert known(fleet).num_requests == 0
    assert fleet.apply_events("demo", events(epoch="100-b", seq=10), 0.0) is None
    assert fleet.apply_events("demo", events(epoch="101-a", seq=0), 0.0) == FleetUpdate()


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("99-z", "100-a"), ("100-a", "100-b"), ("999-a", "1000-a"), ("no number", "1-a"), ("", "1-a")],
)
def test_lives_are_ordered_by_their_birth_and_then_by_their_random_part(earlier: str, later: str) -> None:
    update = fleet_of(card(epoch=earlier)).apply_card(card(epoch=later), 0.0)
    assert update == FleetUpdate(lost=LostWorker(card(epoch=earlier), was_behind=True))
    assert fleet_of(card(epoch=later)).apply_card(card(epoch=earlier), 0.0) == FleetUpdate()


@pytest.mark.parametrize("epoch", ["²-a", "٣-a", "-5-a", "1" * 30 + "-a", "\0", "1.5-a", "--"])
def test_an_epoch_in_no_known_form_is_taken_in_without_harm(epoch: str) -> None:
    fleet = fleet_of(card(epoch=epoch))
    fleet.apply_card(card(epoch="100-a"), 0.0)
    fleet.check_integrity()
    fleet = fleet_of(card(epoch="100-a"))
    assert fleet.apply_card(card(epoch=epoch), 0.0) == FleetUpdate()
    assert known(fleet).card.epoch == "100-a"


@pytest.mark.parametrize(("silent_s", "taken"), [(1.999, False), (2.0, True)])
def test_an_earlier_life_takes_over_only_once_the_known_one_is_lost(silent_s: float, taken: bool) -> None:
    fleet = fleet_of(card(epoch="100-a"))
    update = fleet.apply_card(card(epoch="99-a"), silent_s)
    assert (update.lost is not None) == taken
    assert known(fleet).card.epoch == ("99-a" if taken else "100-a")


def test_an_earlier_life_that_is_refused_does_not_count_as_heard() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    fleet.apply_card(card(epoch="99-a"), 1.5)
    assert lapsed(fleet, 2.0) == ["w1"]


def test_a_worker_that_stops_has_ended_its_streams_and_is_gone() -> None:
    fleet = fleet_of(card(), card("w2"))
    assert fleet.apply_card(card(state=STOPPED), 0.0) == FleetUpdate(left=True)
    assert named(fleet.workers_of("demo")) == ["w2"]


def test_a_stop_of_another_life_or_of_an_unknown_worker_changes_nothing() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    assert fleet.apply_card(card(epoch="99-a", state=STOPPED), 0.0) == FleetUpdate()
    assert fleet.apply_card(card("w2", state=STOPPED), 0.0) == FleetUpdate()
    assert named(fleet.workers_of("demo")) == ["w1"]


def test_events_of_an_unknown_worker_or_life_ask_for_a_discovery() -> None:
    fleet = fleet_of(card())
    assert fleet.apply_events("demo", events("w2"), 0.0) is None
    assert fleet.apply_events("demo", events(epoch="101-a"), 0.0) is None
    assert fleet.apply_events("demo", events(), 0.0) == FleetUpdate()


def test_events_say_what_was_spoken_and_finished() -> None:
    fleet = fleet_of(card())
    update = fleet.apply_events("demo", events(first_token_sent=("a", "b"), finished=("c",)), 0.0)
    assert update == FleetUpdate(first_token_sent=("a", "b"), finished=("c",))


def test_events_set_load_and_state() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(load=LOAD_OF_3, state=DRAINING), 0.0)
    assert (known(fleet).load, known(fleet).state, known(fleet).num_requests) == (LOAD_OF_3, DRAINING, 3)


@pytest.mark.parametrize("seq", [4, 5])
def test_events_that_were_heard_already_are_ignored_and_prove_no_life(seq: int) -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=5), 0.0)
    update = fleet.apply_events("demo", events(seq=seq, load=LOAD_OF_3, first_token_sent=("a",), finished=("b",)), 1.5)
    assert update == FleetUpdate()
    assert known(fleet).load == messages.Load()
    assert lapsed(fleet, 2.0) == ["w1"]


def test_the_holder_of_a_request_is_who_said_to_have_started_it_until_its_end() -> None:
    fleet = fleet_of(card(), card("w2"))
    fleet.apply_events("demo", events("w2", started=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is known(fleet, "w2")
    assert (fleet.owner_of("a", "other"), fleet.owner_of("b", "demo")) == (None, None)
    fleet.apply_events("demo", events("w2", seq=1, finished=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is None


def test_a_snapshot_says_who_holds_what() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=7, started=("old",)), 0.0)
    fleet.snapshots_due(0.0, 1.0)
    fleet.apply_snapshot_part("demo", part(seq=7, running=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is known(fleet)
    assert fleet.owner_of("old", "demo") is None


def test_a_new_life_holds_nothing() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(started=("a",)), 0.0)
    fleet.apply_card(card(epoch="101-a"), 0.0)
    assert fleet.owner_of("a", "demo") is None


def test_load_and_state_are_believed_even_behind_a_gap() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=7, load=LOAD_OF_3), 0.0)
    assert known(fleet).num_requests == 3


def test_what_is_refused_is_counted_and_shown_with_its_reason() -> None:
    fleet = fleet_of(card(kv_block_size=16, total_kv_blocks=9))
    fleet.apply_card(card("w2", epoch="100-b", kv_block_size=32, total_kv_blocks=9), 0.0)
    fleet.apply_events("demo", events("nobody"), 0.0)
    fleet.apply_events("demo", events(seq=0), 0.0)
    fleet.apply_events("demo", events(seq=0), 0.0)
    view = fleet.router_view("r1", 0, 1.0)
    assert [(one.worker_id, one.model) for one in view.refused_cards] == [("w2", "demo")]
    assert "32" in view.refused_cards[0].reason
    assert view.refused_messages == 2
    assert fleet.router_view("r1", 0, 99.0).refused_cards == []


def test_who_has_spoken_or_ended_is_heard_once_and_at_once_even_behind_a_gap() -> None:
    fleet = fleet_of(card())
    fleet.snapshots_due(0.0, 1.0)
    said = events(seq=7, started=("a", "b"), first_token_sent=("a",), finished=("b",))
    assert fleet.apply_events("demo", said, 0.0) == FleetUpdate(first_token_sent=("a",), finished=("b",))
    assert fleet.apply_events("demo", said, 0.0) == FleetUpdate()
    update = fleet.apply_snapshot_part("demo", part(seq=6, running=("b",)), 0.0)
    assert (update.first_token_sent, update.finished) == ((), ())
    assert known(fleet).running == {"a"}


def test_a_snapshot_closes_the_gap_and_what_came_after_it_is_applied_then() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=7), 0.0)
    fleet.apply_events("demo", events(seq=8, started=("b",)), 0.0)
    assert known(fleet).running == set()
    assert named(fleet.snapshots_due(1.0, 1.0)) == ["w1"]
    assert fleet.snapshots_due(1.5, 1.0) == []
    assert named(fleet.snapshots_due(2.0, 1.0)) == ["w1"]
    update = fleet.apply_snapshot_part("demo", part(seq=7, running=("c",)), 2.0)
    assert known(fleet).running == {"b", "c"}
    assert update.snapshot is not None
    assert (set(update.snapshot.running), update.snapshot.requested_at) == ({"c"}, 1.0)
    assert fleet.snapshots_due(9.0, 1.0) == []
    assert fleet.apply_events("demo", events(seq=9, finished=("d",)), 2.0) == FleetUpdate(finished=("d",))


def test_after_the_routers_own_absence_every_worker_is_asked_for_a_snapshot() -> None:
    fleet = fleet_of(card(), card("w2"))
    for name in ("w1", "w2"):
        fleet.apply_events("demo", events(name, seq=0), 0.0)
    assert fleet.snapshots_due(0.0, 1.0) == []
    fleet.mark_all_behind()
    assert named(fleet.snapshots_due(0.0, 1.0)) == ["w1", "w2"]


def test_a_life_that_ended_behind_a_gap_may_have_said_more_than_was_heard() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    fleet.apply_events("demo", events(epoch="100-a", seq=0), 0.0)
    assert not fleet.was_behind(card(epoch="100-a"), 0.0)
    fleet.apply_events("demo", events(epoch="100-a", seq=2), 0.0)
    assert fleet.was_behind(card(epoch="100-a"), 0.0)
    fleet.apply_card(card(epoch="101-a"), 0.0)
    assert fleet.was_behind(card(epoch="100-a"), 0.0)


def test_a_lapsed_worker_that_is_heard_again_keeps_its_place() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=0, load=LOAD_OF_3), 0.0)
    assert lapsed(fleet, 2.0) == ["w1"]
    assert fleet.is_lost(card())
    assert candidates(fleet, 2.0) == []
    fleet.renew_lease(card(), 2.1)
    fleet.remove(card(), 2.1)
    assert not fleet.is_lost(card())
    assert candidates(fleet, 2.2) == ["w1"]
    assert known(fleet).num_requests == 3


def test_a_booking_counts_until_an_event_confirms_it() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.book(at("w1"), PlacementRequest("b", 1), 0.0)
    assert known(fleet).num_requests == 2
    fleet.apply_events("demo", events(seq=0, load=messages.Load(running=1), started=("a",)), 0.0)
    assert known(fleet).num_requests == 2
    fleet.apply_events("demo", events(seq=1, load=messages.Load(), finished=("a", "b")), 0.0)
    assert known(fleet).num_requests == 0


def test_a_booking_taken_back_counts_no_more_and_may_be_taken_back_again() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    for _ in range(2):
        fleet.unbook(at("w1"), "a")
        assert known(fleet).num_requests == 0
    fleet.unbook(at("nobody"), "a")


def test_booking_the_same_request_twice_counts_once() -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 1.0)
    assert known(fleet).num_requests == 1


@pytest.mark.parametrize(("age_s", "num_requests"), [(4.999, 1), (5.0, 0)])
def test_a_booking_that_nobody_confirms_lapses_after_five_seconds(age_s: float, num_requests: int) -> None:
    fleet = fleet_of(card())
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    fleet.sweep(age_s)
    assert known(fleet).num_requests == num_requests


@pytest.mark.parametrize(("silent_s", "names"), [(0.999, ["w1"]), (1.0, [])])
def test_a_worker_silent_for_a_second_gets_no_new_work(silent_s: float, names: list[str]) -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, silent_s) == names
    assert fleet.expire_leases(silent_s) == []


def test_a_suspect_that_speaks_gets_work_again() -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, 1.5) == []
    fleet.apply_events("demo", events(), 1.5)
    assert candidates(fleet, 2.4) == ["w1"]


@pytest.mark.parametrize(("silent_s", "lost"), [(1.999, []), (2.0, ["w1"])])
def test_a_worker_silent_for_two_seconds_is_lost(silent_s: float, lost: list[str]) -> None:
    fleet = fleet_of(card())
    fleet.apply_card(card("w2"), 1.0)
    assert lapsed(fleet, silent_s) == lost
    assert lapsed(fleet, silent_s) == []
    for name in ("w1", "w2"):
        fleet.remove(card(name), silent_s)
    assert (fleet.find(at("w1")) is None) == bool(lost)
    assert fleet.find(at("w2")) is not None


def test_a_lost_worker_that_speaks_again_must_be_discovered_anew() -> None:
    fleet = fleet_of(card())
    forget_silent(fleet, 2.0)
    assert fleet.apply_events("demo", events(), 2.0) is None
    fleet.apply_card(card(), 2.0)
    assert candidates(fleet, 2.0) == ["w1"]


def test_silence_while_the_router_was_away_does_not_count() -> None:
    fleet = fleet_of(card(), card("w2"))
    fleet.renew_all_leases(10.0)
    assert fleet.expire_leases(11.999) == []
    assert lapsed(fleet, 12.0) == ["w1", "w2"]


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


def test_the_number_of_workers_is_bounded_and_those_known_may_still_change() -> None:
    fleet = fleet_of(*(card(f"w{number}") for number in range(MAX_WORKERS)))
    assert fleet.apply_card(card("one-more", model="late"), 0.0) == FleetUpdate()
    assert fleet.find(at("one-more")) is None
    assert fleet.apply_events("demo", events("one-more"), 0.0) is None
    assert fleet.apply_card(card("w0", epoch="101-a"), 0.0).lost is not None
    fleet.check_integrity()
    fleet.apply_card(card("w1", state=STOPPED), 0.0)
    fleet.apply_card(card("one-more"), 0.0)
    assert fleet.find(at("one-more")) is not None
    fleet.check_integrity()


def test_models_are_listed_by_name_with_all_their_workers() -> None:
    fleet = fleet_of(card("w1", model="b"), card("w2", model="a"), card("w3", model="b", state=DRAINING))
    assert [(model, named(workers)) for model, workers in fleet.models()] == [("a", ["w2"]), ("b", ["w1", "w3"])]


@pytest.mark.parametrize(("age_s", "unknown"), [(59.0, False), (60.0, False), (60.001, True)])
def test_only_a_router_older_than_a_minute_says_that_nobody_has_ever_served_a_model(
    age_s: float, unknown: bool
) -> None:
    assert Fleet(began_at=1_000.0).is_unknown("demo", 1_000.0 + age_s) is unknown


def test_a_model_that_was_once_served_is_never_unknown_again() -> None:
    fleet = fleet_of(card())
    forget_silent(fleet, 10.0)
    assert fleet.workers_of("demo") == []
    assert not fleet.is_unknown("demo", 100.0)
    assert fleet.is_unknown("other", 100.0)


def test_an_old_router_can_name_the_models_that_were_served_and_are_not_now() -> None:
    fleet = fleet_of(card(model="gone"))
    forget_silent(fleet, 10.0)
    fleet.apply_card(card(model="demo", epoch="101-a"), 90.0)
    assert fleet.unserved(59.0) is None
    assert fleet.unserved(100.0) == ["gone"]


@pytest.mark.parametrize("epoch", ["100-a", "101-a"])
def test_a_model_that_a_known_worker_turned_to_was_served_too(epoch: str) -> None:
    fleet = fleet_of(card(model="demo"))
    fleet.apply_card(card(model="other", epoch=epoch), 0.0)
    assert named(fleet.workers_of("other")) == ["w1"]
    forget_silent(fleet, 10.0)
    assert not fleet.is_unknown("other", 100.0)


def test_the_number_of_remembered_models_is_bounded() -> None:
    fleet = Fleet(began_at=0.0)
    for number in range(MAX_WORKERS + 1):
        fleet.apply_card(card(model=f"m{number}", epoch=f"{number}-a"), 0.0)
        fleet.apply_card(card(model=f"m{number}", epoch=f"{number}-a", state=STOPPED), 0.0)
    fleet.check_integrity()
    assert fleet.is_unknown("m0", 100.0)
    assert not fleet.is_unknown("m1", 100.0)
    assert not fleet.is_unknown(f"m{MAX_WORKERS}", 100.0)


NAMES = ["w1", "w2", "w3"]
EPOCHS = ["1-a", "1-b", "20-a"]


class Belief:
    """What the model keeps of one worker."""

    def __init__(self, epoch: str, state: messages.WorkerState, now: float) -> None:
        self.epoch, self.state, self.last_seen_at = epoch, state, now
        self.seq = -1
        self.behind = True
        self.reported = 0
        self.bookings: dict[str, float] = {}


class FleetHistory(RuleBasedStateMachine):
    """Random cards, events and silence, against beliefs kept by hand. Times are quarters of a second: exact."""

    @initialize()
    def make(self) -> None:
        self.fleet = Fleet(began_at=0.0)
        self.beliefs: dict[str, Belief] = {}
        self.now = 0.0

    @rule(quarters=st.integers(1, 5))
    def wait(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.sampled_from(EPOCHS),
        state=st.sampled_from([READY, READY, DRAINING, STOPPED]),
    )
    def say_card(self, name: str, epoch: str, state: messages.WorkerState) -> None:
        update = self.fleet.apply_card(card(name, epoch=epoch, state=state), self.now)
        belief = self.beliefs.get(name)
        lost, left = None, False
        if belief is None:
            if state is not STOPPED:
                self.beliefs[name] = Belief(epoch, state, self.now)
        elif belief.epoch == epoch:
            belief.state = state
            if state is STOPPED:
                del self.beliefs[name]
                left = True
        elif state is not STOPPED and (
            EPOCHS.index(epoch) > EPOCHS.index(belief.epoch) or self.now - belief.last_seen_at >= 2
        ):
            lost = (belief.epoch, belief.behind)
            self.beliefs[name] = Belief(epoch, state, self.now)
        assert update.left is left
        assert (update.lost and (update.lost.card.epoch, update.lost.was_behind)) == lost

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.sampled_from(EPOCHS),
        ahead=st.integers(-1, 3),
        running=st.integers(0, 4),
        started=st.sets(st.sampled_from("abc")),
        finished=st.sets(st.sampled_from("abc")),
    )
    def say_events(
        self, name: str, epoch: str, ahead: int, running: int, started: set[str], finished: set[str]
    ) -> None:
        belief = self.beliefs.get(name)
        seq = max(0, (belief.seq if belief else -1) + ahead)
        said = events(
            name,
            seq,
            epoch=epoch,
            load=messages.Load(running=running),
            started=tuple(started),
            finished=tuple(finished),
        )
        update = self.fleet.apply_events("demo", said, self.now)
        if belief is None or belief.epoch != epoch:
            assert update is None
        elif seq <= belief.seq:
            assert update == FleetUpdate()
        else:
            follows = seq == 0 or (not belief.behind and seq == belief.seq + 1)
            belief.behind = not follows
            assert update == FleetUpdate(finished=tuple(finished))
            belief.seq, belief.last_seen_at, belief.state, belief.reported = seq, self.now, READY, running
            for key in started | finished if follows else ():
                belief.bookings.pop(key, None)

    @precondition(lambda self: self.beliefs)
    @rule(data=st.data(), running=st.sets(st.sampled_from("abc")))
    def say_snapshot(self, data: st.DataObject, running: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.beliefs)))
        belief = self.beliefs[name]
        asked = [one for one in named(self.fleet.snapshots_due(self.now, 0.0)) if one == name]
        update = self.fleet.apply_snapshot_part(
            "demo", part(name, belief.seq, epoch=belief.epoch, running=tuple(running)), self.now
        )
        assert bool(asked) == belief.behind == (update.snapshot is not None)
        belief.last_seen_at, belief.behind = self.now, False
        for key in running if update.snapshot else ():
            belief.bookings.pop(key, None)

    @precondition(lambda self: self.beliefs)
    @rule(data=st.data(), key=st.sampled_from("abc"))
    def book(self, data: st.DataObject, key: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.beliefs)))
        self.fleet.book(at(name), PlacementRequest(key, 1), self.now)
        self.beliefs[name].bookings[key] = self.now

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from("abc"))
    def unbook(self, name: str, key: str) -> None:
        self.fleet.unbook(at(name), key)
        if name in self.beliefs:
            self.beliefs[name].bookings.pop(key, None)

    @rule()
    def expire_leases(self) -> None:
        silent = {name for name, belief in self.beliefs.items() if self.now - belief.last_seen_at >= 2}
        assert self.fleet.has_expired_leases(self.now) == bool(silent)
        assert set(lapsed(self.fleet, self.now)) == silent
        for name in silent:
            self.fleet.remove(known(self.fleet, name).card, self.now)
        for name in silent:
            del self.beliefs[name]

    @rule()
    def sweep(self) -> None:
        self.fleet.sweep(self.now)
        for belief in self.beliefs.values():
            belief.bookings = {key: at for key, at in belief.bookings.items() if self.now - at < 5}

    @rule()
    def renew_all_leases(self) -> None:
        self.fleet.renew_all_leases(self.now)
        for belief in self.beliefs.values():
            belief.last_seen_at = self.now

    @invariant()
    def agrees_with_the_beliefs(self) -> None:
        self.fleet.check_integrity()
        assert set(named(self.fleet.workers_of("demo"))) == set(self.beliefs)
        for name, belief in self.beliefs.items():
            worker = known(self.fleet, name)
            assert (worker.card.epoch, worker.state, worker.log.is_behind) == (
                belief.epoch,
                belief.state,
                belief.behind,
            )
            assert worker.num_requests == belief.reported + len(belief.bookings)
        may = {name for name, b in self.beliefs.items() if b.state is READY and self.now - b.last_seen_at < 1}
        assert set(candidates(self.fleet, self.now)) == may


TestFleetHistory = FleetHistory.TestCase
TestFleetHistory.settings = settings(max_examples=80, stateful_step_count=40)


def test_workers_of_two_models_may_have_one_name_and_do_not_touch_each_other() -> None:
    fleet = fleet_of(card(epoch="100-a"), card(epoch="900-b", model="other"))
    assert (candidates(fleet, 0.0), candidates(fleet, 0.0, "other")) == (["w1"], ["w1"])
    demo, other = fleet.find(at("w1")), fleet.find(at("w1", "other"))
    assert demo is not None
    assert other is not None
    assert demo is not other
    assert fleet.apply_card(card(epoch="999-c", model="other"), 1.0).lost is not None
    assert fleet.apply_card(card(epoch="999-c", model="other", state=STOPPED), 1.0).left
    assert fleet.find(at("w1")) is demo
    assert fleet.find(at("w1", "other")) is None
    fleet.check_integrity()


def test_what_a_worker_says_is_believed_of_its_own_model_only() -> None:
    fleet = fleet_of(card("mine"), card("theirs", model="other"))
    fleet.apply_events("demo", events("mine", started=("default:r",)), 0.0)
    assert fleet.apply_events("other", events("mine", seq=1, finished=("default:r",)), 0.0) is None
    fleet.apply_events("other", events("theirs", started=("default:r",)), 0.0)
    owner = fleet.owner_of("default:r", "demo")
    assert owner is fleet.find(at("mine"))
    fleet.apply_events("other", events("theirs", seq=1, finished=("default:r",)), 0.0)
    assert fleet.owner_of("default:r", "demo") is owner
    fleet.check_integrity()


def test_a_card_that_is_refused_does_not_silence_another_worker_with_its_epoch() -> None:
    odd = {"hash_scheme": "xxh3-64:odd", "kv_block_size": 16, "total_kv_blocks": 8}
    even = {"hash_scheme": "xxh3-64:even", "kv_block_size": 16, "total_kv_blocks": 8}
    fleet = fleet_of(card("mine", epoch="100-a"), card("first", model="other", **odd))
    assert fleet.apply_card(card("second", model="other", epoch="100-a", **even), 0.0).refused is not None
    fleet.apply_events("demo", events("mine", load=LOAD_OF_3), 0.0)
    assert known(fleet, "mine").load == LOAD_OF_3
