"""A beat is a sign of life of the workers that it names, if it comes from their own process and fits their logs."""

import pytest

from tests.router.builders import LOAD_OF_3, candidates, card, events, expired, fleet_of, known
from tokenbus.protocol.wire import errors, internal, limits
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.beats import BeatUpdate
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import PlacementRequest

FIRST = limits.FIRST_EVENT_SEQ


def is_plain(update: BeatUpdate) -> bool:
    """Whether a beat had no effect but leases."""
    return (update.back, update.refused, update.strange, update.num_lost) == ([], [], [], 0)


def beat(seqs: dict[str, int], *, epoch: str = "100-a", next_ms: float = 1_000.0) -> internal.Beat:
    return internal.Beat(epoch=epoch, next_ms=next_ms, seqs=seqs)


@pytest.fixture
def fleet() -> Fleet:
    """Two workers of the process `p`, and one of `q`, whose first entries have arrived."""
    made = fleet_of(card("w1", process="p"), card("w2", process="p"), card("w3", process="q"))
    for name in ("w1", "w2", "w3"):
        made.apply_events("demo", events(name, FIRST), 0.0)
    return made


def test_a_log_that_begins_with_its_first_entry_is_complete(fleet: Fleet) -> None:
    assert not known(fleet).log.is_behind
    earlier = fleet_of(card("w1"))
    earlier.apply_events("demo", events("w1", FIRST), 0.0)
    assert known(earlier).log.is_behind


def test_workers_that_a_beat_names_are_suspect_after_twice_the_promised_time_and_lost_after_four_times(
    fleet: Fleet,
) -> None:
    assert is_plain(fleet.apply_beat("demo", "p", beat({"w1": FIRST, "w2": FIRST}), 0.5))
    assert candidates(fleet, 1.1) == ["w1", "w2"]
    assert candidates(fleet, 2.4) == ["w1", "w2"]
    assert candidates(fleet, 2.5) == []
    assert expired(fleet, 4.4) == ["w3"]
    assert expired(fleet, 4.5) == ["w1", "w2"]


@pytest.mark.parametrize("next_ms", [0.0, 250.0, 500.0])
def test_no_promise_makes_a_worker_suspect_sooner_than_an_entry(fleet: Fleet, next_ms: float) -> None:
    fleet.apply_beat("demo", "p", beat({"w1": FIRST}, next_ms=next_ms), 10.0)
    assert candidates(fleet, 10.9) == ["w1"]
    assert candidates(fleet, 11.0) == []
    assert "w1" not in expired(fleet, 11.9)
    assert "w1" in expired(fleet, 12.0)


def test_an_entry_of_its_own_makes_a_worker_expected_again_soon(fleet: Fleet) -> None:
    fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 0.5)
    assert candidates(fleet, 0.6) == ["w1", "w2", "w3"]
    fleet.apply_events("demo", events("w1", FIRST + 1, load=LOAD_OF_3), 0.7)
    assert candidates(fleet, 1.6) == ["w1"]
    assert candidates(fleet, 1.7) == []
    assert "w1" in expired(fleet, 2.7)


def test_a_worker_that_was_given_a_request_is_lost_as_soon_as_one_that_has_said_so(fleet: Fleet) -> None:
    fleet.apply_beat("demo", "p", beat({"w1": FIRST, "w2": FIRST}), 0.5)
    fleet.book(known(fleet).card.address, PlacementRequest("default:r1", 3), 0.6)
    assert expired(fleet, 2.5) == ["w1", "w3"]


def test_a_worker_that_a_beat_omits_falls_silent(fleet: Fleet) -> None:
    fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 0.5)
    assert candidates(fleet, 1.2) == ["w1"]
    assert expired(fleet, 2.0) == ["w2", "w3"]


def test_a_process_can_not_speak_for_the_workers_of_another(fleet: Fleet) -> None:
    assert fleet.apply_beat("demo", "p", beat({"w1": FIRST, "w3": FIRST}), 0.5).refused == ["w3"]
    assert candidates(fleet, 1.2) == ["w1"]
    assert fleet.router_view("r", 0, 0.5).refused_messages == 1


def test_a_worker_whose_card_names_no_process_speaks_for_itself_only() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(), 0.0)
    assert fleet.apply_beat("demo", "p", beat({"w1": 0}), 0.5).refused == ["w1"]
    assert candidates(fleet, 1.0) == []


def test_a_number_that_jumps_means_lost_entries_and_a_snapshot_and_is_a_sign_of_life_nevertheless(fleet: Fleet) -> None:
    update = fleet.apply_beat("demo", "p", beat({"w1": FIRST + 3, "w2": FIRST}), 0.5)
    assert (update.num_lost, update.refused) == (3, [])
    assert [one.card.worker_id for one in fleet.snapshots_due(0.5, 1.0)] == ["w1"]
    assert candidates(fleet, 1.2) == ["w1", "w2"]
    # a number without end costs no more than one snapshot in a second
    fleet.apply_beat("demo", "p", beat({"w1": 2**62}), 0.6)
    assert fleet.snapshots_due(1.4, 1.0) == []
    fleet.check_integrity()


def test_a_number_below_the_last_known_one_contradicts_the_log_and_proves_nothing(fleet: Fleet) -> None:
    fleet.apply_events("demo", events("w1", FIRST + 1), 0.1)
    assert fleet.apply_beat("demo", "p", beat({"w1": FIRST, "w2": -7}), 0.5).refused == ["w1", "w2"]
    assert candidates(fleet, 1.2) == []


def test_a_beat_seals_the_last_entry(fleet: Fleet) -> None:
    fleet.apply_events("demo", events("w1", FIRST + 1, tokens=[(1, 7)]), 0.1)
    log = known(fleet).log
    assert log.doubt(FIRST + 1, is_streamed=True) == "not_sealed"
    fleet.apply_beat("demo", "p", beat({"w1": FIRST + 1}), 0.2)
    assert not log.doubt(FIRST + 1, is_streamed=True)


def test_a_beat_that_names_unknown_workers_or_epochs_has_them_discovered(fleet: Fleet) -> None:
    assert fleet.apply_beat("demo", "p", beat({"w9": 3}), 0.5).strange
    assert fleet.apply_beat("demo", "p", beat({"w1": 3}, epoch="200-b"), 0.5).strange
    assert fleet.apply_beat("other", "p", beat({"w1": 3}), 0.5).strange
    assert candidates(fleet, 1.2) == []


def test_a_late_beat_of_an_ended_epoch_has_nothing_discovered_and_keeps_nothing_alive(fleet: Fleet) -> None:
    fleet.apply_card(card("w1", epoch="200-b", process="p"), 0.5)
    assert is_plain(fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 0.6))
    assert candidates(fleet, 1.4) == ["w1"]
    assert candidates(fleet, 1.5) == []


def test_a_worker_that_was_silent_or_lost_or_had_no_responders_is_back_with_a_beat(fleet: Fleet) -> None:
    fleet.mark_no_responders(known(fleet).card)
    assert candidates(fleet, 0.1) == ["w2", "w3"]
    assert fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 0.2).back
    assert candidates(fleet, 0.3) == ["w1", "w2", "w3"]
    assert expired(fleet, 9.0) == ["w1", "w2", "w3"]
    assert fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 9.5).back
    assert candidates(fleet, 10.0) == ["w1"]
    assert fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 12.0).back
    assert not fleet.apply_beat("demo", "p", beat({"w1": FIRST}), 12.8).back


@pytest.mark.parametrize("next_ms", [-1.0, 10_000.1, 1e300])
def test_a_beat_that_promises_nothing_useful_is_refused(next_ms: float) -> None:
    with pytest.raises(errors.RequestError, match="next_ms: must be at least 0 and at most 10000"):
        validation.check_beat(beat({}, next_ms=next_ms))


def test_a_beat_for_more_workers_than_a_process_can_have_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="at most 1024 workers, got 1025"):
        validation.check_beat(beat({f"w{number}": 1 for number in range(1_025)}))
