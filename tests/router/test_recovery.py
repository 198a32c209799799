"""A router keeps the tokens of its own requests, from the worker, the incarnation and the attempt that have them."""

from array import array

import pytest

from tests.router.builders import at, card, events, fleet_of, flight, known, part
from tokenbus.protocol.wire import block_hash, codec, internal, messages, subjects
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

KEY = "default:r1"
HELD = internal.RunningRequest(
    id=KEY, attempt=1, stream_no=1, num_tokens=3, token_ids=block_hash.pack_token_ids([6, 7])
)
"""A request with three tokens, of which a router has asked for the last two."""


class Attempts:
    def __init__(self) -> None:
        self.moved: list[tuple[str, int]] = []
        self.repeated: list[str] = []

    def move(self, flight: Flight, address: subjects.WorkerAddress, attempt: int) -> None:
        self.moved.append((address.worker_id, attempt))

    def repeat_end(self, flight: Flight, address: subjects.WorkerAddress) -> None:
        self.repeated.append(address.worker_id)


class Lifecycle:
    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self.lost: list[tuple[str, str]] = []
        self.num_taken = 0
        self.forgotten: list[tuple[str, str]] = []

    def forget(self, flight: Flight, reason: str) -> None:
        self.forgotten.append((flight.key, reason))
        self._flights.remove(flight)

    def recover(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        self.lost.append((flight.key, worker.card.epoch))
        self.num_taken += takes
        self._flights.reclaim(flight)

    def finish(self, flight: Flight) -> None:
        self.forget(flight, "by_worker")


class Testbed:
    """The guardian of one request, which worker w1 has accepted."""

    __test__ = False

    def __init__(self) -> None:
        self.fleet = fleet_of(card("w1"), card("w2"), card("w1", model="other"))
        self.flights = Flights(8, 1_000)
        self.attempts = Attempts()
        self.lifecycle = Lifecycle(self.flights)
        self.recovery = Recovery(
            self.fleet,
            self.flights,
            self.attempts,  # type: ignore[arg-type]
            self.lifecycle,  # type: ignore[arg-type]
            RouterMetrics(),
            "router-1",
        )
        self.flight = flight("r1")
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, b"1234")
        self.dispatch("w1")
        self.flights.accept(self.flight, "w1", 0.0)

    def dispatch(self, worker_id: str) -> None:
        self.flights.start_attempt(self.flight, worker_id)

    def hear(self, entry: internal.Events, model: str = "demo") -> None:
        update = self.fleet.apply_events(model, entry, 0.0)
        if update is not None:
            self.recovery.apply(update, at(entry.worker_id, model))
        self.flights.check_integrity()

    def snapshot(self, running: internal.RunningRequest) -> None:
        """Asks worker w1 for a snapshot, and gets one with that request."""
        self.fleet.snapshots_due(0.0, 0.0)
        one = codec.replace(part("w1", 2), running=[running])
        self.recovery.apply(self.fleet.apply_snapshot_part("demo", one, 0.0), at("w1"))
        self.flights.check_integrity()

    @property
    def tokens(self) -> list[int]:
        return list(self.flight.completion.token_ids)


def started(seq: int, worker_id: str = "w1", attempt: int = 1, epoch: str = "100-a") -> internal.Events:
    entry = events(worker_id, seq, epoch=epoch)
    return codec.replace(entry, started=[internal.Started(id=KEY, stream_no=1, attempt=attempt, prompt_tokens=1)])


def test_tokens_are_kept_with_the_entry_of_the_last_one() -> None:
    testbed = Testbed()
    testbed.hear(codec.replace(started(0), stream_nos=b"\1\0\0\0\2\0\0\0", token_ids=b"\5\0\0\0\6\0\0\0"))
    testbed.hear(events("w1", 1))
    testbed.hear(events("w1", 2, tokens=[(1, 7)]))
    testbed.hear(events("w1", 3))
    assert (testbed.tokens, testbed.flight.completion.last_seq) == ([5, 7], 2)


@pytest.mark.parametrize(
    "claim",
    [
        started(0, attempt=2),
        started(0, attempt=0),
        started(0, "w2"),
        started(0, epoch="99-z"),
        codec.replace(started(0), started=[internal.Started(id="default:r2", stream_no=1, attempt=1, prompt_tokens=1)]),
    ],
)
def test_tokens_count_only_for_the_attempt_at_the_worker_that_has_it(claim: internal.Events) -> None:
    testbed = Testbed()
    testbed.hear(claim)
    testbed.hear(events(claim.worker_id, 1, epoch=claim.epoch, tokens=[(1, 7)]))
    assert testbed.tokens == []


def test_a_worker_of_another_model_can_not_add_tokens() -> None:
    testbed = Testbed()
    testbed.hear(started(0), model="other")
    testbed.hear(events("w1", 1, tokens=[(1, 7)]), model="other")
    assert testbed.tokens == []


def test_tokens_behind_a_gap_count_once_a_snapshot_has_closed_it() -> None:
    testbed = Testbed()
    testbed.hear(codec.replace(started(0), stream_nos=b"\1\0\0\0", token_ids=b"\5\0\0\0"))
    testbed.fleet.snapshots_due(0.0, 1.0)
    testbed.hear(events("w1", 3, tokens=[(1, 8)]))
    assert testbed.tokens == [5]
    assert testbed.fleet.snapshots_due(0.0, 1.0) == [known(testbed.fleet)]
    asked = testbed.recovery.snapshot_request(known(testbed.fleet), 1_000)
    assert asked == internal.SnapshotRequest(known_tokens={KEY: 1})
    snapshot = codec.replace(part("w1", 2), running=[HELD])
    testbed.recovery.apply(testbed.fleet.apply_snapshot_part("demo", snapshot, 0.0), at("w1"))
    assert (testbed.tokens, testbed.flight.completion.last_seq) == ([5, 6, 7, 8], 3)


def test_an_end_that_the_router_missed_is_published_again_since_its_client_may_have_missed_it_too() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.fleet.snapshots_due(1.0, 1.0)
    testbed.hear(events("w1", 3))
    assert testbed.attempts.repeated == []
    testbed.fleet.snapshots_due(2.0, 1.0)
    testbed.recovery.apply(testbed.fleet.apply_snapshot_part("demo", part("w1", 3), 2.0), at("w1"))
    assert testbed.lifecycle.forgotten == [(KEY, "by_worker")]
    assert testbed.attempts.repeated == ["w1"]


def test_an_end_that_the_router_heard_of_is_not_asked_for_again() -> None:
    testbed = Testbed()
    testbed.fleet.snapshots_due(0.0, 1.0)
    testbed.fleet.apply_snapshot_part("demo", codec.replace(part("w1", 2), running=[HELD]), 0.0)
    testbed.hear(codec.replace(events("w1", 3), finished=[KEY]))
    assert testbed.lifecycle.forgotten == [(KEY, "by_worker")]
    assert testbed.attempts.repeated == []


def test_a_snapshot_that_was_asked_for_too_early_is_asked_for_again() -> None:
    """The request was accepted after the router had said what it knows, so its tokens are not in the answer."""
    testbed = Testbed()
    testbed.fleet.snapshots_due(0.0, 1.0)
    snapshot = codec.replace(part("w1", 2), running=[HELD])
    testbed.recovery.apply(testbed.fleet.apply_snapshot_part("demo", snapshot, 0.0), at("w1"))
    assert testbed.tokens == []
    assert known(testbed.fleet).log.is_behind
    testbed.hear(events("w1", 3, tokens=[(1, 8)]))
    assert testbed.tokens == []


@pytest.mark.parametrize("in_snapshot", [False, True])
def test_a_worker_that_still_has_an_earlier_attempt_is_told_that_it_was_moved(in_snapshot: bool) -> None:
    testbed = Testbed()
    testbed.flights.reclaim(testbed.flight)
    testbed.dispatch("w2")
    if in_snapshot:
        testbed.fleet.snapshots_due(0.0, 1.0)
        snapshot = codec.replace(part("w1", 2), running=[HELD])
        testbed.recovery.apply(testbed.fleet.apply_snapshot_part("demo", snapshot, 0.0), at("w1"))
    else:
        testbed.hear(started(0))
    assert testbed.attempts.moved == [("w1", 1)]
    assert testbed.tokens == []


def test_what_a_superseded_worker_has_sent_before_its_end_still_counts() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    update = testbed.fleet.apply_card(card("w1", epoch="101-a"), 0.0)
    testbed.recovery.apply(update, at("w1"))
    assert testbed.lifecycle.lost == [(KEY, "100-a")]
    testbed.hear(events("w1", 1, tokens=[(1, 7)]))
    assert testbed.tokens == [7]
    assert testbed.flight.completion.token_ids == array("I", [7])
    testbed.hear(events("w1", 2, finished=(KEY,)))
    assert (testbed.flight.ended_by, testbed.flights.find_flight(KEY)) == ("w1", testbed.flight)


LEAVING = messages.WorkerState.LEAVING
LOST = [(KEY, "100-a")]


def test_a_request_at_a_worker_that_leaves_is_taken_from_there() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.hear(events("w1", 1, state=messages.WorkerState.DRAINING))
    assert testbed.lifecycle.lost == []
    testbed.hear(events("w1", 2, state=LEAVING))
    assert testbed.lifecycle.lost == LOST
    testbed.hear(events("w1", 3, state=LEAVING))
    assert testbed.lifecycle.lost == LOST


def test_a_card_that_says_so_is_enough() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.recovery.apply(testbed.fleet.apply_card(card("w1", state=LEAVING), 0.0), at("w1"))
    assert testbed.lifecycle.lost == LOST


def test_a_request_whose_accept_comes_when_its_worker_leaves_already_is_taken_too() -> None:
    testbed = Testbed()
    testbed.flights.reclaim(testbed.flight)
    testbed.hear(codec.replace(started(0), state=LEAVING))
    assert testbed.lifecycle.lost == []
    testbed.flights.accept(testbed.flight, "w1", 0.0)
    testbed.hear(events("w1", 1, state=LEAVING))
    assert testbed.lifecycle.lost == LOST


def test_only_a_request_that_could_go_on_elsewhere_and_is_guarded_here_is_taken() -> None:
    testbed = Testbed()
    testbed.flight.is_named = False
    testbed.hear(codec.replace(started(0), state=LEAVING))
    assert testbed.lifecycle.lost == []
    testbed.hear(codec.replace(events("w1", 1, state=LEAVING), guardians={1: "router-1"}))
    assert testbed.lifecycle.lost == LOST
    other = Testbed()
    other.flight.prompt_ids = None
    other.hear(codec.replace(started(0), state=LEAVING))
    assert other.lifecycle.lost == []


def test_nothing_is_taken_while_a_log_may_have_named_another_guardian_behind_a_gap() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.hear(events("w1", 2, state=LEAVING))
    assert known(testbed.fleet).state is LEAVING
    assert testbed.lifecycle.lost == []
    testbed.snapshot(codec.replace(HELD, num_tokens=0, token_ids=b"", router_id="router-1"))
    assert testbed.lifecycle.lost == LOST


@pytest.mark.parametrize("router_id", ["router-1", "router-2", ""])
@pytest.mark.parametrize("in_snapshot", [False, True])
@pytest.mark.parametrize("has_prompt", [False, True])
def test_a_request_is_forgotten_once_its_worker_names_another_router(
    router_id: str, in_snapshot: bool, has_prompt: bool
) -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    if not has_prompt and in_snapshot:
        testbed.flights.unbind_stream(testbed.flight)
        testbed.flight.prompt_ids = None
    if in_snapshot:
        testbed.fleet.mark_all_behind()
        testbed.snapshot(codec.replace(HELD, num_tokens=0, token_ids=b"", router_id=router_id))
    else:
        testbed.hear(codec.replace(events("w1", 1), guardians={2: "router-3", 1: router_id, 7: "router-2"}))
    is_lost = router_id == "router-2"
    assert testbed.lifecycle.forgotten == [(KEY, "by_router")] * is_lost
    assert len(testbed.flights) == (not is_lost)
    assert testbed.lifecycle.lost == []


def test_a_snapshot_that_does_not_fit_what_is_known_still_names_the_guardian() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.fleet.mark_all_behind()
    testbed.snapshot(codec.replace(HELD, router_id="router-2"))
    assert testbed.lifecycle.forgotten == [(KEY, "by_router")]


def test_another_worker_s_log_names_no_guardian_of_a_request() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.hear(codec.replace(started(0, "w2"), guardians={1: "router-2"}))
    assert testbed.lifecycle.forgotten == []


def test_a_request_that_another_router_takes_is_known_to_be_gone_from_its_worker() -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    assert testbed.fleet.owner_of(KEY, "demo") is known(testbed.fleet)
    testbed.hear(codec.replace(events("w1", 1), taken=[KEY]))
    assert testbed.fleet.owner_of(KEY, "demo") is None
    assert testbed.flights.holds(testbed.flight)
    testbed.fleet.check_integrity()


@pytest.mark.parametrize("in_snapshot", [False, True])
def test_tokens_of_a_request_that_was_forgotten_for_want_of_memory_are_not_kept_again(in_snapshot: bool) -> None:
    testbed = Testbed()
    testbed.hear(started(0))
    testbed.flight.completion.logprobs += bytes(1_000)
    assert testbed.flights.trim() == 1
    if in_snapshot:
        testbed.fleet.mark_all_behind()
        testbed.fleet.snapshots_due(0.0, 1.0)
        asked = testbed.recovery.snapshot_request(known(testbed.fleet), 1_000)
        assert asked == internal.SnapshotRequest()
        whole = codec.replace(HELD, token_ids=block_hash.pack_token_ids([5, 6, 7]))
        snapshot = codec.replace(part("w1", 2), running=[whole])
        testbed.recovery.apply(testbed.fleet.apply_snapshot_part("demo", snapshot, 0.0), at("w1"))
        assert not known(testbed.fleet).log.is_behind
    else:
        testbed.hear(codec.replace(started(1), stream_nos=b"\1\0\0\0", token_ids=b"\5\0\0\0"))
    assert (testbed.tokens, testbed.flights.trim()) == ([], 0)
    assert testbed.flights.holds(testbed.flight)


def test_a_snapshot_request_names_no_more_requests_than_fit_a_message_and_those_of_which_most_is_known() -> None:
    testbed = Testbed()
    testbed.flights = testbed.recovery._flights = Flights(2_000, 1_000_000)
    for number in range(1_000):
        one = flight(f"{number:0128}")
        testbed.flights.add(one, 10)
        testbed.flights.set_prompt_ids(one, b"1234")
        one.completion.token_ids.extend(range(70_000 if number >= 990 else 1))
        one.attempt_offset = 0 if number >= 995 else len(one.completion)
        testbed.flights.accept(one, "w1", 0.0)
    asked = testbed.recovery.snapshot_request(known(testbed.fleet), 50_000)
    assert 40_000 < len(codec.encode(asked)) <= 50_000
    assert asked.wants_others
    assert [int(key.removeprefix("default:")) for key in asked.known_tokens][:6] == [995, 996, 997, 998, 999, 0]


def test_a_stream_that_its_worker_can_not_continue_is_taken_once_however_often_the_worker_says_so() -> None:
    testbed = Testbed()
    testbed.flight.is_named = True
    for seq in (0, 1):
        testbed.hear(codec.replace(events("w1", seq), stranded=[KEY, "default:another"]))
    assert ([key for key, _ in testbed.lifecycle.lost], testbed.lifecycle.num_taken) == ([KEY], 1)


def test_a_stream_of_which_another_router_is_the_guardian_is_not_taken() -> None:
    testbed = Testbed()
    testbed.flight.is_named = False
    testbed.hear(codec.replace(events("w1", 0), stranded=[KEY]))
    assert testbed.lifecycle.lost == []
