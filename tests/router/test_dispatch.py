"""A request whose worker is lost goes on elsewhere only if this router still has all that another worker needs."""

from collections.abc import Collection, Iterator, Sequence

import pytest

from tests.router.builders import NoLoads, at, card, events, fleet_of, flight, known
from tests.sim.world import Process, world
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.telemetry.tracing import NOOP_SPAN
from tokenbus.protocol.wire import errors, internal, messages, subjects
from tokenbus.router.placement.placement import NoWorker, Placement, PlacementRequest
from tokenbus.router.requests.attempts import AlreadyStreamingError, Attempt, Revocation
from tokenbus.router.requests.dispatch import Dispatcher
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

KEY = "default:r1"


def begun(placement: Placement) -> Attempt:
    return Attempt(placement, NOOP_SPAN, Outgoing("run", b""), 0.0)


class Attempts:
    """Answers as a worker does that has not sampled anything yet, and then accepts."""

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self.continued: list[list[int]] = []
        """The tokens behind which a run continued its request."""
        self.takes: list[bool] = []
        """Whether each revocation was to take the request."""

    async def revoke(self, flight: Flight, worker: Worker, *, takes: bool = False) -> Revocation:
        self.takes.append(takes)
        return Revocation.DROPPED

    def move(self, flight: Flight, address: subjects.WorkerAddress, attempt: int) -> None:
        raise AssertionError("it can't go on elsewhere")

    def begin(self, flight: Flight, placement: Placement) -> Attempt:
        self.continued.append(list(flight.completion.token_ids))
        return begun(placement)

    async def finish(self, flight: Flight, attempt: Attempt) -> errors.Error | None:
        self.accept(flight, attempt.placement.worker.card)
        return None

    def accept(self, flight: Flight, card: messages.Card) -> None:
        self._flights.accept(flight, card.worker_id, 0.0)


class Refusals:
    """Lets the only worker refuse a run some times before it accepts one. It is placement queue and attempts."""

    def __init__(self, code: errors.Code, num_refusals: int) -> None:
        self.fleet, self.flights = fleet_of(card("w1")), Flights(8, 1_000)
        self.num_runs = 0
        self._code = code
        self._num_refusals = num_refusals
        self.dispatcher = Dispatcher(self.fleet, self, self, NoLoads(), RouterMetrics(), 60.0)  # type: ignore[arg-type]
        self.flight = flight("r1")
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, b"1234")

    async def dispatch(self, *, has_begun: bool) -> None:
        """Dispatches a request in virtual time."""
        self.flight.first_accepted_at = 0.0 if has_begun else None
        await self.dispatcher.dispatch(self.flight)

    async def place(self, flight: Flight, excluded: Collection[str]) -> Placement | NoWorker:
        return NoWorker() if "w1" in excluded else Placement(known(self.fleet), "kv")

    def begin(self, flight: Flight, placement: Placement) -> Attempt:
        return begun(placement)

    async def finish(self, flight: Flight, attempt: Attempt) -> errors.Error | None:
        self.num_runs += 1
        if self.num_runs <= self._num_refusals:
            return errors.make_error(self._code)
        self.flights.accept(flight, "w1", 0.0)
        return None


class Testbed:
    """A request that worker w1 has streamed until it came back as another process, and the wait for worker w2.

    It is its own placement queue."""

    __test__ = False

    def __init__(self, *, stream: bool = True) -> None:
        self.fleet = fleet_of(card("w1"), card("w2"))
        self.flights = Flights(8, 1_000)
        self.attempts = Attempts(self.flights)
        metrics = RouterMetrics()
        self._recovery = Recovery(self.fleet, self.flights, self.attempts, None, metrics, "router-1")  # type: ignore[arg-type]
        self.dispatcher = Dispatcher(self.fleet, self, self.attempts, NoLoads(), metrics, 60.0)  # type: ignore[arg-type]
        self.flight = flight("r1", stream=stream)
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, b"1234")
        self.flights.start_attempt(self.flight, "w1")
        self.hear(events(seq=0, started=(KEY,), tokens=[(1, 5)]), events(seq=1))
        lost = self.fleet.apply_card(card("w1", epoch="101-a"), 0.0).lost
        assert lost is not None
        self.lost = lost
        self._late: Sequence[internal.Events] = ()

    async def redispatch(self, late: Sequence[internal.Events]) -> None:
        """Continues the request. What is `late` comes while it waits for a worker."""
        self._late = late
        await self.dispatcher.redispatch(self.flight, self.lost, is_certain=True)

    async def place(self, flight: Flight, excluded: Collection[str]) -> Placement:
        self.hear(*self._late)
        self.fleet.book(at("w2"), PlacementRequest(KEY, 1), 0.0)
        return Placement(known(self.fleet, "w2"), "kv")

    def hear(self, *entries: internal.Events) -> None:
        for entry in entries:
            update = self.fleet.apply_events("demo", entry, 0.0)
            assert update is not None
            self._recovery.apply(update, at(entry.worker_id))


LATE_TOKEN = events(seq=2, tokens=[(1, 6)])


async def test_a_dropped_request_whose_prompt_was_forgotten_for_want_of_memory_is_lost() -> None:
    fleet, flights = fleet_of(card("w1")), Flights(8, 1_000)
    dispatcher = Dispatcher(fleet, None, Attempts(flights), NoLoads(), RouterMetrics(), 60.0)  # type: ignore[arg-type]
    one = flight("r1")
    assert one.prompt_ids is None
    with pytest.raises(errors.RequestError) as refused:
        await dispatcher.redispatch(one, known(fleet), is_certain=False)
    assert refused.value.error.code is errors.Code.WORKER_LOST


@pytest.mark.parametrize(
    ("late", "stream", "continued"),
    [([], True, [5]), ([LATE_TOKEN, events(seq=3)], True, [5, 6]), ([LATE_TOKEN], False, [5, 6])],
)
async def test_what_comes_while_a_request_waits_for_its_next_worker_is_continued_too(
    late: list[internal.Events], stream: bool, continued: list[int]
) -> None:
    testbed = Testbed(stream=stream)
    await testbed.redispatch(late)
    assert testbed.attempts.continued == [continued]
    assert testbed.flight.worker_id == "w2"


@pytest.mark.parametrize("late", [[LATE_TOKEN], [events(seq=3)]], ids=["not sealed", "behind a gap"])
async def test_a_request_ends_if_its_client_may_have_got_unknown_text_while_it_waited(
    late: list[internal.Events],
) -> None:
    testbed = Testbed()
    with pytest.raises(errors.RequestError) as refused:
        await testbed.redispatch(late)
    assert refused.value.error.code is errors.Code.WORKER_LOST
    assert testbed.attempts.continued == []
    assert known(testbed.fleet, "w2").num_requests == 0


@pytest.mark.parametrize("late", [[], [events(seq=3)]], ids=["at once", "while it waited"])
async def test_a_request_that_another_router_has_continued_does_not_end_though_its_text_is_unknown(
    late: list[internal.Events],
) -> None:
    testbed = Testbed()
    if not late:
        testbed.lost.log.mark_behind()
    testbed.hear(events("w2", 0, started=(KEY,)))
    with pytest.raises(AlreadyStreamingError):
        await testbed.redispatch(late)
    assert testbed.attempts.continued == []
    assert known(testbed.fleet, "w2").bookings == {}


async def test_a_request_that_turns_out_to_have_ended_while_it_waited_is_not_continued() -> None:
    testbed = Testbed()
    await testbed.redispatch([events(seq=2, tokens=[(1, 6)], finished=(KEY,))])
    assert testbed.attempts.continued == []
    assert testbed.flight.worker_id == testbed.flight.ended_by == "w1"
    assert known(testbed.fleet, "w2").num_requests == 0


@pytest.fixture
def process() -> Iterator[Process]:
    with world(seed=1) as made:
        yield made.process("router")


def test_a_stream_that_has_begun_waits_for_room_at_the_only_worker_that_can_continue_it(process: Process) -> None:
    """Several routers may have sent their streams there at the same time."""
    refusals = Refusals(errors.Code.OVERLOADED, 40)
    process.do(refusals.dispatch(has_begun=True))
    assert (refusals.flight.worker_id, refusals.num_runs) == ("w1", 41)


@pytest.mark.parametrize(
    ("code", "has_begun", "at_most"),
    [(errors.Code.OVERLOADED, False, 1), (errors.Code.SHUTTING_DOWN, True, 1), (errors.Code.NO_WORKER, True, 12)],
)
def test_other_refusals_end_a_request_soon(process: Process, code: errors.Code, has_begun: bool, at_most: int) -> None:
    refusals = Refusals(code, 1_000)
    with pytest.raises(errors.RequestError) as refused:
        process.do(refusals.dispatch(has_begun=has_begun))
    assert (refused.value.error.code, refusals.num_runs) == (code, at_most)


def test_a_stream_for_which_no_worker_ever_has_room_ends(process: Process) -> None:
    refusals = Refusals(errors.Code.OVERLOADED, 1_000)
    began_at = process.world.now
    with pytest.raises(errors.RequestError):
        process.do(refusals.dispatch(has_begun=True))
    assert 60.0 < process.world.now - began_at < 70.0


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_a_stream_is_taken_from_a_worker_that_leaves_and_goes_on_though_its_last_token_is_not_sealed(
    is_leaving: bool,
) -> None:
    testbed = Testbed()
    worker = known(testbed.fleet, "w1")
    worker.state = messages.WorkerState.LEAVING if is_leaving else messages.WorkerState.READY
    testbed.flight.completion.last_seq = 99
    await testbed.dispatcher.redispatch(testbed.flight, worker, is_certain=False)
    assert testbed.attempts.takes == [is_leaving]
    assert testbed.attempts.continued == [[5]]
    assert repr(testbed.flight.completion) == "<PartialCompletion 1 tokens, 0 losses>"


async def test_a_router_that_stops_dispatches_nothing_more() -> None:
    refusals = Refusals(errors.Code.OVERLOADED, 0)
    refusals.dispatcher.is_stopped = True
    await refusals.dispatch(has_begun=True)
    assert (refusals.num_runs, refusals.flight.worker_id) == (0, None)
