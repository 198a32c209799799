"""Flights are found by key and by accepting worker, from their receipt to their end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.router.builders import at, flight
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.router.requests.flights.flight import Flight, Flights


def test_a_new_flight_is_not_accepted() -> None:
    new = flight("r1", tenant="acme inc")
    assert (new.request_id, new.tenant, new.key, new.model) == ("r1", "acme inc", "acme=20inc:r1", "demo")
    assert (new.attempt, new.worker_id, new.ended_by, new.cancelled, new.has_begun) == (0, None, None, False, False)


def test_requests_with_the_same_adapters_need_the_same_workers_whatever_the_scales() -> None:
    some = [flight(f"r{number}") for number in range(3)]
    assert not some[0].needs
    for number, one in enumerate(some):  # each kind that waits is looked at in each event of a worker
        one.adapters = (Adapter("d1", 1.0 + number), Adapter("d2", 2.0 + number))
    assert len({one.needs for one in some}) == 1
    some[0].adapters = some[0].adapters[:1]
    assert some[0].needs != some[1].needs


def test_a_request_without_a_deadline_has_no_remaining_time() -> None:
    assert flight().remaining_ms(1e9) is None


@pytest.mark.parametrize(("now", "left"), [(10.0, 500.0), (10.25, 250.0), (10.5, 0.0), (10.75, -250.0)])
def test_remaining_time_counts_from_the_receipt(now: float, left: float) -> None:
    assert flight(received_at=10.0, timeout_ms=500.0).remaining_ms(now) == left


def test_the_same_id_of_two_tenants_makes_two_flights() -> None:
    flights = Flights(2, 1_000)
    ours, theirs = flight("r1", tenant="ours"), flight("r1", tenant="theirs")
    flights.add(ours, 10)
    flights.add(theirs, 10)
    assert (flights.find_flight(ours.key), flights.find_flight(theirs.key)) == (ours, theirs)


def test_a_key_can_only_be_added_once() -> None:
    flights = Flights(2, 1_000)
    first = flight()
    flights.add(first, 10)
    with pytest.raises(AssertionError):
        flights.add(flight(), 10)
    assert flights.find_flight(first.key) is first


def test_flights_are_full_at_capacity_and_not_one_before() -> None:
    flights = Flights(2, 1_000)
    one, two = flight("r1"), flight("r2")
    flights.add(one, 10)
    assert flights.has_room(10)
    flights.add(two, 10)
    assert not flights.has_room(0)
    flights.remove(one)
    assert flights.has_room(10)
    assert len(flights) == 1


def test_more_flights_than_the_capacity_violate_the_integrity() -> None:
    flights = Flights(1, 1_000)
    flights.add(flight("r1"), 10)
    flights.check_integrity()
    flights.add(flight("r2"), 10)
    with pytest.raises(AssertionError):
        flights.check_integrity()


def test_the_tokens_of_an_earlier_stream_count_as_memory_and_are_kept_once() -> None:
    flights = Flights(2, 1_000)
    given = messages.ResumeFrom(token_ids=[7] * 200, hash_scheme="x")
    one = flight("r1", resume_from=given)
    flights.add(one, 300)
    flights.set_prompt_ids(one, bytes(8))
    assert (one.held_bytes, one.request.resume_from) == (808, None)
    assert (list(one.completion.token_ids), one.hash_scheme) == ([7] * 200, "x")
    assert not flights.has_room(300)


def test_an_accepted_flight_belongs_to_its_worker_until_it_is_removed() -> None:
    flights = Flights(4, 1_000)
    one, two = flight("r1"), flight("r2")
    flights.add(one, 10)
    flights.add(two, 10)
    flights.accept(one, "w1", 0.0)
    assert (one.worker_id, two.worker_id) == ("w1", None)
    assert (flights.accepted_by(at("w1")), flights.accepted_by(at("w2"))) == ([one], [])
    flights.remove(one)
    assert flights.accepted_by(at("w1")) == []
    assert flights.find_flight(one.key) is None


def test_the_flights_of_a_worker_may_be_removed_while_iterating() -> None:
    flights = Flights(4, 1_000)
    for name in ("r1", "r2", "r3"):
        new = flight(name)
        flights.add(new, 10)
        flights.accept(new, "w1", 0.0)
    for there in flights.accepted_by(at("w1")):
        flights.remove(there)
    assert len(flights) == 0
    flights.check_integrity()


def test_a_flight_is_accepted_once_and_only_while_it_is_open() -> None:
    flights = Flights(4, 1_000)
    known, stranger = flight("r1"), flight("r2")
    flights.add(known, 10)
    flights.accept(known, "w1", 0.0)
    with pytest.raises(AssertionError):
        flights.accept(known, "w2", 0.0)
    with pytest.raises(AssertionError):
        flights.accept(stranger, "w1", 0.0)
    assert (known.worker_id, flights.accepted_by(at("w2")), stranger.worker_id) == ("w1", [], None)
    flights.check_integrity()


def test_a_removed_flight_can_not_be_removed_again() -> None:
    flights = Flights(4, 1_000)
    one = flight()
    flights.add(one, 10)
    flights.remove(one)
    with pytest.raises(KeyError):
        flights.remove(one)
    flights.check_integrity()


def test_the_bytes_of_unaccepted_prompts_are_bounded() -> None:
    flights = Flights(8, 100)
    one, two = flight("r1"), flight("r2")
    flights.add(one, 60)
    assert flights.has_room(40)
    assert not flights.has_room(41)
    flights.add(two, 40)
    flights.set_prompt_ids(one, b"x" * 20)
    assert one.request.prompt is None
    assert (flights.has_room(40), flights.has_room(41)) == (True, False)
    flights.accept(one, "w1", 0.0)
    assert (flights.has_room(60), flights.has_room(61)) == (True, False)
    flights.reclaim(one)
    assert (flights.has_room(40), flights.has_room(41)) == (True, False)
    flights.remove(two)
    assert flights.has_room(80)
    flights.check_integrity()


def begun(flights: Flights, name: str, prompt_tokens: int, stream_no: int) -> Flight:
    """Returns a flight that a worker streams."""
    one = flight(name)
    flights.add(one, 0)
    flights.set_prompt_ids(one, bytes(4 * prompt_tokens))
    flights.start_attempt(one, "w1")
    flights.bind_stream(one, "demo w1 100-a", stream_no)
    flights.accept(one, "w1", 0.0)
    return one


def test_the_largest_accepted_requests_lose_their_prompts_when_all_together_take_too_much() -> None:
    flights = Flights(8, 400)
    small, grown, large = (begun(flights, name, size, size) for name, size in (("a", 10), ("b", 20), ("c", 60)))
    assert (flights.trim(), large.prompt_ids) == (0, bytes(240))
    grown.completion.token_ids.extend(range(30))
    assert flights.trim() == 1
    assert (large.prompt_ids, large.stream, small.prompt_ids, grown.prompt_ids) == (None, None, bytes(40), bytes(80))
    flights.check_integrity()
    grown.completion.token_ids.extend(range(80))
    assert flights.trim() == 1
    assert (grown.prompt_ids, len(grown.completion)) == (None, 0)
    flights.check_integrity()


def test_a_stream_is_found_by_its_number_until_another_attempt_or_the_end() -> None:
    flights = Flights(8, 400)
    one, two = begun(flights, "a", 1, 7), begun(flights, "b", 1, 8)
    assert flights.streams_of("demo w1 100-a") == {7: one, 8: two}
    assert flights.streams_of("demo w1 101-a") == {}
    flights.reclaim(one)
    assert flights.streams_of("demo w1 100-a")[7] is one
    flights.start_attempt(one, "w2")
    assert flights.streams_of("demo w1 100-a") == {8: two}
    flights.remove(two)
    assert flights.streams_of("demo w1 100-a") == {}
    flights.check_integrity()


def test_a_worker_that_gives_two_requests_one_number_is_believed_only_the_second() -> None:
    flights = Flights(8, 400)
    one, two = begun(flights, "a", 1, 7), begun(flights, "b", 1, 7)
    assert flights.streams_of("demo w1 100-a") == {7: two}
    assert one.stream is None
    flights.remove(one)
    flights.check_integrity()


def test_a_reclaimed_flight_belongs_to_the_router_again() -> None:
    flights = Flights(8, 100)
    one = flight("r1")
    flights.add(one, 10)
    flights.accept(one, "w1", 0.0)
    assert flights.unaccepted() == []
    flights.reclaim(one)
    assert (flights.accepted_by(at("w1")), flights.unaccepted(), one.worker_id) == ([], [one], None)
    flights.check_integrity()
    flights.accept(one, "w2", 0.0)
    assert flights.accepted_by(at("w2")) == [one]


class FlightsHistory(RuleBasedStateMachine):
    """Random receipts, accepts and ends, compared with a plain list of open flights."""

    open_flights = Bundle("open_flights")

    @initialize(capacity=st.integers(1, 6))
    def make(self, capacity: int) -> None:
        self.flights = Flights(capacity, 1_000)
        self.capacity = capacity
        self.known: list[Flight] = []

    @rule(target=open_flights, name=st.sampled_from("abcd"), tenant=st.sampled_from(["default", "acme"]))
    def receive(self, name: str, tenant: str) -> object:
        new = flight(name, tenant=tenant)
        duplicates = [one for one in self.known if one.key == new.key]
        assert self.flights.find_flight(new.key) is (duplicates[0] if duplicates else None)
        assert self.flights.has_room(0) == (len(self.known) < self.capacity)
        if duplicates or not self.flights.has_room(0):
            return multiple()
        self.flights.add(new, 10)
        self.known.append(new)
        return new

    @rule(one=open_flights, worker_id=st.sampled_from(["w1", "w2"]))
    def accept(self, one: Flight, worker_id: str) -> None:
        if one.worker_id is None:
            self.flights.accept(one, worker_id, 0.0)

    @rule(one=open_flights)
    def lose(self, one: Flight) -> None:
        if one.worker_id is not None:
            self.flights.reclaim(one)

    @rule(one=open_flights, stream_no=st.integers(0, 2), incarnation=st.sampled_from("AB"))
    def stream(self, one: Flight, stream_no: int, incarnation: str) -> None:
        if one.prompt_ids is None:
            self.flights.set_prompt_ids(one, b"1234")
        self.flights.bind_stream(one, incarnation, stream_no)
        one.completion.token_ids.append(1)

    @rule(one=open_flights)
    def dispatch(self, one: Flight) -> None:
        self.flights.start_attempt(one, "w1")

    @rule()
    def trim(self) -> None:
        self.flights.trim()

    @rule(one=consumes(open_flights))
    def end(self, one: Flight) -> None:
        self.flights.remove(one)
        self.known.remove(one)

    @rule(worker_id=st.sampled_from(["w1", "w2"]))
    def look(self, worker_id: str) -> None:
        there = {one.key for one in self.known if one.worker_id == worker_id}
        assert {one.key for one in self.flights.accepted_by(at(worker_id))} == there

    @invariant()
    def agrees_with_the_list(self) -> None:
        self.flights.check_integrity()
        assert len(self.flights) == len(self.known)
        assert all(self.flights.find_flight(one.key) is one for one in self.known)

    def teardown(self) -> None:
        for one in list(self.known):
            self.end(one)
            self.agrees_with_the_list()
        assert self.flights.accepted_by(at("w1")) == self.flights.accepted_by(at("w2")) == []


TestFlightsHistory = FlightsHistory.TestCase
TestFlightsHistory.settings = settings(max_examples=80, stateful_step_count=40)


def test_a_worker_of_another_model_can_not_report_on_a_request() -> None:
    flights = Flights(4, 1_000)
    mine = flight("r1")
    flights.add(mine, 1)
    flights.accept(mine, "w1", 0.0)
    assert flights.accepted_by(at("w1", "other")) == []
    assert list(flights.find_all([mine.key, "default:unknown"], "other")) == []
    assert list(flights.find_all([mine.key, "default:unknown"], mine.model)) == [mine]
