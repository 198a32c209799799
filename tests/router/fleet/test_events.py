"""Events and snapshots keep loads, owners of requests and gaps up to date."""

import pytest

from tests.router.builders import DRAINING, LOAD_OF_3, at, card, events, expired, fleet_of, known, named, part
from tokenbus.protocol.wire import codec, internal, messages
from tokenbus.router.fleet.fleet import MAX_SNAPSHOTS, FleetUpdate


def test_events_of_an_unknown_worker_or_incarnation_ask_for_a_discovery() -> None:
    fleet = fleet_of(card())
    assert fleet.apply_events("demo", events("w2"), 0.0) is None
    assert fleet.apply_events("demo", events(epoch="101-a"), 0.0) is None
    update = fleet.apply_events("demo", events(), 0.0)
    assert update is not None
    assert update.worker is known(fleet)


def test_events_are_passed_on_with_the_requests_that_have_finished() -> None:
    fleet = fleet_of(card())
    said = events(tokens=[(1, 7), (2, 9)], finished=("c",))
    assert fleet.apply_events("demo", said, 0.0) == FleetUpdate(known(fleet), (said,), ("c",))


def test_events_set_load_and_state() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(load=LOAD_OF_3, state=DRAINING), 0.0)
    assert (known(fleet).load, known(fleet).state, known(fleet).num_requests) == (LOAD_OF_3, DRAINING, 3)


@pytest.mark.parametrize("seq", [4, 5])
def test_old_events_are_ignored_and_do_not_renew_the_lease(seq: int) -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=5), 0.0)
    update = fleet.apply_events("demo", events(seq=seq, load=LOAD_OF_3, tokens=[(1, 7)], finished=("b",)), 1.5)
    assert update == FleetUpdate()
    assert known(fleet).load == messages.Load()
    assert expired(fleet, 2.0) == ["w1"]


def test_the_owner_of_a_request_is_the_worker_that_started_it_until_its_end() -> None:
    fleet = fleet_of(card(), card("w2"))
    fleet.apply_events("demo", events("w2", started=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is known(fleet, "w2")
    assert (fleet.owner_of("a", "other"), fleet.owner_of("b", "demo")) == (None, None)
    fleet.apply_events("demo", events("w2", seq=1, finished=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is None


def test_a_snapshot_replaces_the_requests_that_a_worker_owns() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=7, started=("old",)), 0.0)
    fleet.snapshots_due(0.0, 1.0)
    fleet.apply_snapshot_part("demo", part(seq=7, running=("a",)), 0.0)
    assert fleet.owner_of("a", "demo") is known(fleet)
    assert fleet.owner_of("old", "demo") is None


def test_a_snapshot_closes_the_gap_and_then_the_events_after_it_are_applied() -> None:
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
    assert [one.seq for one in update.entries] == [8]
    last = events(seq=9, finished=("d",))
    assert fleet.apply_events("demo", last, 2.0) == FleetUpdate(known(fleet), (last,), ("d",))


def test_load_and_state_are_taken_over_even_behind_a_gap() -> None:
    fleet = fleet_of(card())
    fleet.apply_events("demo", events(seq=7, load=LOAD_OF_3), 0.0)
    assert known(fleet).num_requests == 3


def test_ends_are_reported_once_and_at_once_but_tokens_only_when_the_gap_before_them_is_closed() -> None:
    fleet = fleet_of(card())
    fleet.snapshots_due(0.0, 1.0)
    said = events(seq=7, started=("a", "b"), tokens=[(1, 7)], finished=("b",))
    assert fleet.apply_events("demo", said, 0.0) == FleetUpdate(known(fleet), (), ("b",))
    assert fleet.apply_events("demo", said, 0.0) == FleetUpdate()
    update = fleet.apply_snapshot_part("demo", part(seq=6, running=("b",)), 0.0)
    assert (update.entries, update.finished) == ((said,), ())
    assert known(fleet).running == {"a"}


def test_a_seal_counts_for_the_incarnation_that_it_names_even_if_that_is_over() -> None:
    fleet = fleet_of(card(epoch="100-a"))
    fleet.apply_events("demo", events(epoch="100-a", seq=0), 0.0)
    earlier = known(fleet)
    fleet.apply_seal(at("w1"), internal.Seal(epoch="99-z", seq=0), 0.0)
    assert earlier.log.sealed_seq == -1
    fleet.apply_card(card(epoch="101-a"), 0.0)
    fleet.apply_events("demo", events(epoch="101-a", seq=0), 0.0)
    fleet.apply_seal(at("w1"), internal.Seal(epoch="100-a", seq=0), 1.0)
    fleet.apply_seal(at("w2"), internal.Seal(epoch="101-a", seq=0), 1.0)
    assert (earlier.log.sealed_seq, known(fleet).log.sealed_seq) == (0, -1)


def test_after_a_disconnect_of_the_router_every_worker_is_asked_for_a_snapshot() -> None:
    fleet = fleet_of(card(), card("w2"))
    for name in ("w1", "w2"):
        fleet.apply_events("demo", events(name, seq=0), 0.0)
    assert fleet.snapshots_due(0.0, 1.0) == []
    fleet.mark_all_behind()
    assert named(fleet.snapshots_due(0.0, 1.0)) == ["w1", "w2"]


def test_32_snapshots_are_awaited_at_a_time_busy_workers_first_and_those_that_do_not_answer_last() -> None:
    count = 3 * MAX_SNAPSHOTS
    fleet = fleet_of(*(card(f"w{number:02}") for number in range(count)))
    for number in range(count):
        fleet.apply_events("demo", events(f"w{number:02}", seq=0, load=messages.Load(running=number)), 0.0)
    fleet.mark_all_behind()
    busiest_first = [f"w{number:02}" for number in reversed(range(count))]
    asked = named(fleet.snapshots_due(0.0, 1.0))
    assert asked == busiest_first[:MAX_SNAPSHOTS]
    assert fleet.snapshots_due(0.5, 1.0) == []
    fleet.apply_snapshot_part("demo", part(asked[7], seq=0), 0.5)
    asked += named(fleet.snapshots_due(0.5, 1.0))
    assert asked == busiest_first[: MAX_SNAPSHOTS + 1]
    for now in (1.0, 1.5, 2.0, 2.5, 3.0):
        asked += named(fleet.snapshots_due(now, 1.0))
    assert [asked.index(name) for name in busiest_first] == sorted(asked.index(name) for name in busiest_first)


def test_events_count_only_for_the_workers_own_model() -> None:
    fleet = fleet_of(card("mine"), card("theirs", model="other"))
    fleet.apply_events("demo", events("mine", started=("default:r",)), 0.0)
    assert fleet.apply_events("other", events("mine", seq=1, finished=("default:r",)), 0.0) is None
    fleet.apply_events("other", events("theirs", started=("default:r",)), 0.0)
    owner = fleet.owner_of("default:r", "demo")
    assert owner is fleet.find_worker(at("mine"))
    fleet.apply_events("other", events("theirs", seq=1, finished=("default:r",)), 0.0)
    assert fleet.owner_of("default:r", "demo") is owner
    fleet.check_integrity()


def health(num_devices: int, uptime_s: float = 1.0) -> messages.WorkerHealth:
    device = messages.DeviceHealth(name="host", kind="cpu", total_bytes=2, free_bytes=1)
    return messages.WorkerHealth(
        devices=[device] * num_devices, front_bytes=1, engine_bytes=2, uptime_s=uptime_s, engine_uptime_s=0.0
    )


def test_a_worker_s_health_is_what_it_said_last_and_stays_until_it_says_more() -> None:
    fleet = fleet_of(codec.replace(card(), health=health(1)))
    seen = []
    for seq, said in enumerate((None, health(2), None, health(1, uptime_s=6.0), health(65))):
        fleet.apply_events("demo", codec.replace(events(seq=seq), health=said), 0.0)
        seen.append(fleet.card_view(known(fleet), 0.0).health)
    assert seen == [None, health(2), health(2), health(1, uptime_s=6.0), health(1, uptime_s=6.0)]
