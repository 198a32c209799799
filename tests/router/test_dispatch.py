"""A request whose worker is lost goes on elsewhere only if this router still has all that another worker needs."""

from collections.abc import Collection, Sequence

import pytest

from tests.router.builders import at, card, events, fleet_of, flight, known
from tokenbus.protocol.wire import errors, internal, messages, subjects
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import Placement, PlacementRequest
from tokenbus.router.requests.attempts import Revocation
from tokenbus.router.requests.dispatch import Dispatcher
from tokenbus.router.requests.flight import Flight, Flights
from tokenbus.router.requests.recovery import Recovery

KEY = "default:r1"


class Attempts:
    """Answers as a worker does that has not sampled anything yet, and then accepts."""

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self.continued: list[list[int]] = []
        """The tokens behind which a run continued its request."""

    async def revoke(self, flight: Flight, worker: Worker, *, takes: bool = False) -> Revocation:
        return Revocation.DROPPED

    def move(self, flight: Flight, address: subjects.WorkerAddress, attempt: int) -> None:
        raise AssertionError("it can't go on elsewhere")

    async def run(self, flight: Flight, placement: Placement) -> errors.Error | None:
        self.continued.append(list(flight.completion.token_ids))
        self.accept(flight, placement.worker.card)
        return None

    def accept(self, flight: Flight, card: messages.Card) -> None:
        self._flights.accept(flight, card.worker_id, 0.0)


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
        self._dispatcher = Dispatcher(self.fleet, self, self.attempts, metrics, 60.0)  # type: ignore[arg-type]
        self.flight = flight("r1", stream=stream)
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, b"1234")
        self.flights.start_attempt(self.flight, "w1")
        self.hear(events(seq=0, started=(KEY,), tokens=[(1, 5)]), events(seq=1))
        lost = self.fleet.apply_card(card("w1", epoch="101-a"), 0.0).lost
        assert lost is not None
        self._lost = lost
        self._late: Sequence[internal.Events] = ()

    async def redispatch(self, late: Sequence[internal.Events]) -> None:
        """Continues the request. What is `late` comes while it waits for a worker."""
        self._late = late
        await self._dispatcher.redispatch(self.flight, self._lost, is_certain=True)

    async def place(self, flight: Flight, excluded: Collection[str]) -> Placement:
        self.hear(*self._late)
        self.fleet.book(at("w2"), PlacementRequest(KEY, 1), 0.0)
        return Placement(known(self.fleet, "w2"), "kv")

    def hear(self, *entries: internal.Events) -> None:
        for entry in entries:
            update = self.fleet.apply_events("demo", entry, 0.0)
            assert update is not None
            self._recovery.apply(update, at("w1"))


LATE_TOKEN = events(seq=2, tokens=[(1, 6)])


async def test_a_dropped_request_whose_prompt_was_forgotten_for_want_of_memory_is_lost() -> None:
    fleet, flights = fleet_of(card("w1")), Flights(8, 1_000)
    dispatcher = Dispatcher(fleet, None, Attempts(flights), RouterMetrics(), 60.0)  # type: ignore[arg-type]
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


async def test_a_request_that_turns_out_to_have_ended_while_it_waited_is_not_continued() -> None:
    testbed = Testbed()
    await testbed.redispatch([events(seq=2, tokens=[(1, 6)], finished=(KEY,))])
    assert testbed.attempts.continued == []
    assert testbed.flight.worker_id == testbed.flight.ended_by == "w1"
    assert known(testbed.fleet, "w2").num_requests == 0
