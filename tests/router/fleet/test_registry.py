"""The registry believes the latest incarnation of each worker, refuses impossible cards, and knows the models."""

import weakref

import pytest

from tests.router.builders import (
    DRAINING,
    LOAD_OF_3,
    STOPPED,
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
from tokenbus.router.fleet.fleet import MAX_WORKERS, Fleet, FleetUpdate
from tokenbus.router.placement.placement import PlacementRequest


def test_a_card_makes_a_worker_known_and_a_candidate() -> None:
    fleet = fleet_of(card())
    assert candidates(fleet, 0.0) == ["w1"]
    assert candidates(fleet, 0.0, "other") == []
    assert fleet.find_worker(at("w2")) is None


def test_a_card_of_the_same_incarnation_updates_the_worker_but_does_not_renew_its_lease() -> None:
    fleet = fleet_of(card())
    assert fleet.apply_card(card(state=DRAINING, features=["chat"]), 1.5) == FleetUpdate()
    assert known(fleet).card.features == ["chat"]
    assert candidates(fleet, 1.5) == []
    assert expired(fleet, 2.0) == ["w1"]


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
def test_a_card_with_an_impossible_number_is_refused(changes: dict[str, int]) -> None:
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


def test_a_later_incarnation_takes_over_at_once_and_the_streams_of_the_earlier_one_are_lost() -> None:
    fleet = fleet_of(card(epoch="100-b"))
    fleet.apply_events("demo", events(epoch="100-b", seq=0, load=LOAD_OF_3), 0.0)
    fleet.book(at("w1"), PlacementRequest("a", 1), 0.0)
    earlier = known(fleet)
    assert fleet.apply_card(card(epoch="101-a"), 0.0) == FleetUpdate(lost=earlier)
    assert known(fleet).num_requests == 0
    assert fleet.apply_events("demo", events(epoch="99-a", seq=10), 0.0) is None
    assert fleet.apply_events("demo", events(epoch="101-a", seq=0), 0.0) is not None
    assert known(fleet).log.seq == 0


def test_what_a_superseded_incarnation_has_sent_counts_for_two_seconds_but_not_as_load() -> None:
    fleet = fleet_of(card(epoch="100-b"))
    fleet.apply_events("demo", events(epoch="100-b", seq=0, started=("a",)), 0.0)
    fleet.apply_card(card(epoch="101-a"), 1.0)
    late = events(epoch="100-b", seq=1, load=LOAD_OF_3, tokens=[(1, 7)], finished=("a",))
    update = fleet.apply_events("demo", late, 2.9)
    assert update is not None
    assert (update.entries, update.finished) == ((late,), ("a",))
    assert update.worker is not known(fleet)
    assert known(fleet).num_requests == 0
    assert fleet.apply_events("demo", events(epoch="100-b", seq=2), 3.0) is None


def test_an_incarnation_is_forgotten_two_seconds_after_a_later_one_has_replaced_it() -> None:
    fleet = fleet_of(card(epoch="100-b"))
    superseded = weakref.ref(known(fleet))
    fleet.apply_card(card(epoch="101-a"), 1.0)
    fleet.sweep(2.9)
    assert superseded() is not None
    fleet.sweep(3.0)
    assert superseded() is None


def ended(*epochs: str) -> list[messages.PreviousEpoch]:
    """The epochs that a process has ended, the latest first."""
    return [messages.PreviousEpoch(epoch=epoch, seq=7 - number) for number, epoch in enumerate(epochs)]


@pytest.mark.parametrize(
    ("epochs", "end_seq", "settled_at"),
    [
        ([], None, 1.5),
        (["100-b"], 7, 3.0),
        (["99-a"], None, 1.5),
        (["100-d", "100-c", "100-b", "99-a"], 5, 3.0),
        (["100-d", "100-c"], None, 1.5),
    ],
)
def test_a_frontend_that_fenced_itself_says_what_may_still_come_of_its_epoch_even_if_later_cards_were_missed(
    epochs: list[str], end_seq: int | None, settled_at: float
) -> None:
    fleet = fleet_of(card(epoch="100-b"))
    named = ended(*epochs)
    successor = card(epoch="101-a", previous=named[0] if named else None, earlier=named[1:])
    lost = fleet.apply_card(successor, 1.0).lost
    assert lost is not None
    assert (lost.log.end_seq, lost.settled_at) == (end_seq, settled_at)


@pytest.mark.parametrize(
    ("seqs", "end_seq", "is_whole"),
    [((), None, False), ((0,), None, True), ((0, 2), None, False), ((0, 1), 1, True), ((0, 1), 2, False)],
)
def test_a_log_is_whole_without_a_gap_up_to_the_last_entry_that_can_come(
    seqs: tuple[int, ...], end_seq: int | None, is_whole: bool
) -> None:
    fleet = fleet_of(card())
    for seq in seqs:
        fleet.apply_events("demo", events(seq=seq), 0.0)
    worker = known(fleet)
    worker.log.end_seq = end_seq
    assert (not worker.log.doubt(-1, is_streamed=False)) is is_whole


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("99-z", "100-a"), ("100-a", "100-b"), ("999-a", "1000-a"), ("no number", "1-a"), ("", "1-a")],
)
def test_incarnations_are_ordered_by_their_start_time_and_then_by_their_random_part(earlier: str, later: str) -> None:
    lost = fleet_of(card(epoch=earlier)).apply_card(card(epoch=later), 0.0).lost
    assert lost is not None
    assert (lost.card, lost.log.is_behind) == (card(epoch=earlier), True)
    assert fleet_of(card(epoch=later)).apply_card(card(epoch=earlier), 0.0) == FleetUpdate()


@pytest.mark.parametrize("epoch", ["²-a", "٣-a", "-5-a", "1" * 30 + "-a", "\0", "1.5-a", "--"])
def test_an_epoch_in_an_unknown_form_does_no_harm(epoch: str) -> None:
    fleet = fleet_of(card(epoch=epoch))
    fleet.apply_card(card(epoch="100-a"), 0.0)
    fleet.check_integrity()
    fleet = fleet_of(card(epoch="100-a"))
    assert fleet.apply_card(card(epoch=epoch), 0.0) == FleetUpdate()
    assert known(fleet).card.epoch == "100-a"


@pytest.mark.parametrize(("silent_s", "taken"), [(1.999, False), (2.0, True)])
def test_an_earlier_incarnation_takes_over_only_once_the_known_one_is_lost(silent_s: float, taken: bool) -> None:
    fleet = fleet_of(card(epoch="100-a"))
    update = fleet.apply_card(card(epoch="99-a"), silent_s)
    assert (update.lost is not None) == taken
    assert known(fleet).card.epoch == ("99-a" if taken else "100-a")


def test_the_card_of_an_earlier_incarnation_does_not_renew_the_lease() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    fleet.apply_card(card(epoch="99-a"), 1.5)
    assert expired(fleet, 2.0) == ["w1"]


def test_a_worker_that_stops_is_removed() -> None:
    fleet = fleet_of(card(), card("w2"))
    assert fleet.apply_card(card(state=STOPPED), 0.0) == FleetUpdate(left=True)
    assert named(fleet.workers_of("demo")) == ["w2"]


def test_a_stop_of_another_incarnation_or_of_an_unknown_worker_changes_nothing() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    assert fleet.apply_card(card(epoch="99-a", state=STOPPED), 0.0) == FleetUpdate()
    assert fleet.apply_card(card("w2", state=STOPPED), 0.0) == FleetUpdate()
    assert named(fleet.workers_of("demo")) == ["w1"]


def test_a_new_incarnation_owns_nothing() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(started=("a",)), 0.0)
    fleet.apply_card(card(epoch="101-a"), 0.0)
    assert fleet.owner_of("a", "demo") is None


def test_refused_cards_and_messages_are_reported_to_clients() -> None:
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


def test_a_refused_card_does_not_block_another_worker_with_the_same_epoch() -> None:
    odd = {"hash_scheme": "xxh3-64:odd", "kv_block_size": 16, "total_kv_blocks": 8}
    even = {"hash_scheme": "xxh3-64:even", "kv_block_size": 16, "total_kv_blocks": 8}
    fleet = fleet_of(card("mine", epoch="100-a"), card("first", model="other", **odd))
    assert fleet.apply_card(card("second", model="other", epoch="100-a", **even), 0.0).refused is not None
    fleet.apply_events("demo", events("mine", load=LOAD_OF_3), 0.0)
    assert known(fleet, "mine").load == LOAD_OF_3


def test_the_number_of_workers_is_bounded_but_known_ones_can_still_change() -> None:
    fleet = fleet_of(*(card(f"w{number}") for number in range(MAX_WORKERS)))
    assert fleet.apply_card(card("one-more", model="late"), 0.0) == FleetUpdate()
    assert fleet.find_worker(at("one-more")) is None
    assert fleet.apply_events("demo", events("one-more"), 0.0) is None
    assert fleet.apply_card(card("w0", epoch="101-a"), 0.0).lost is not None
    fleet.check_integrity()
    fleet.apply_card(card("w1", state=STOPPED), 0.0)
    fleet.apply_card(card("one-more"), 0.0)
    assert fleet.find_worker(at("one-more")) is not None
    fleet.check_integrity()


def test_models_are_listed_by_name_with_all_their_workers() -> None:
    fleet = fleet_of(card("w1", model="b"), card("w2", model="a"), card("w3", model="b", state=DRAINING))
    assert [(model, named(workers)) for model, workers in fleet.models()] == [("a", ["w2"]), ("b", ["w1", "w3"])]


@pytest.mark.parametrize(("age_s", "unknown"), [(59.0, False), (60.0, False), (60.001, True)])
def test_only_a_router_older_than_a_minute_calls_a_model_unknown(age_s: float, unknown: bool) -> None:
    assert Fleet(began_at=1_000.0).is_unknown("demo", 1_000.0 + age_s) is unknown


def test_a_model_that_was_once_served_is_never_unknown_again() -> None:
    fleet = fleet_of(card())
    forget_silent(fleet, 10.0)
    assert fleet.workers_of("demo") == []
    assert not fleet.is_unknown("demo", 100.0)
    assert fleet.is_unknown("other", 100.0)


def test_an_old_router_can_name_the_models_that_are_no_longer_served() -> None:
    fleet = fleet_of(card(model="gone"))
    forget_silent(fleet, 10.0)
    fleet.apply_card(card(model="demo", epoch="101-a"), 90.0)
    assert fleet.unserved(59.0) is None
    assert fleet.unserved(100.0) == ["gone"]


@pytest.mark.parametrize("epoch", ["100-a", "101-a"])
def test_a_model_that_a_known_worker_switched_to_is_known_too(epoch: str) -> None:
    fleet = fleet_of(card(model="demo"))
    fleet.apply_card(card(model="other", epoch=epoch), 0.0)
    assert named(fleet.workers_of("other")) == ["w1"]
    forget_silent(fleet, 10.0)
    assert not fleet.is_unknown("other", 100.0)


def test_the_number_of_known_models_is_bounded() -> None:
    fleet = Fleet(began_at=0.0)
    for number in range(MAX_WORKERS + 1):
        fleet.apply_card(card(model=f"m{number}", epoch=f"{number}-a"), 0.0)
        fleet.apply_card(card(model=f"m{number}", epoch=f"{number}-a", state=STOPPED), 0.0)
    fleet.check_integrity()
    assert fleet.is_unknown("m0", 100.0)
    assert not fleet.is_unknown("m1", 100.0)
    assert not fleet.is_unknown(f"m{MAX_WORKERS}", 100.0)


def test_workers_of_two_models_may_have_the_same_id() -> None:
    fleet = fleet_of(card(epoch="100-a"), card(epoch="900-b", model="other"))
    assert (candidates(fleet, 0.0), candidates(fleet, 0.0, "other")) == (["w1"], ["w1"])
    demo, other = fleet.find_worker(at("w1")), fleet.find_worker(at("w1", "other"))
    assert demo is not None
    assert other is not None
    assert demo is not other
    assert fleet.apply_card(card(epoch="999-c", model="other"), 1.0).lost is not None
    assert fleet.apply_card(card(epoch="999-c", model="other", state=STOPPED), 1.0).left
    assert fleet.find_worker(at("w1")) is demo
    assert fleet.find_worker(at("w1", "other")) is None
    fleet.check_integrity()
