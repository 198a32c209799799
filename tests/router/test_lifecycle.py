"""A router that stops hands over the requests that no worker has, and ends those that no router accepts."""

import asyncio
from collections.abc import Callable

import pytest

from tests.router.builders import NoLoads, card, fleet_of, flight, free_quota, known
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.request_telemetry import FlightTelemetry, RequestLogSettings
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.next_turns import NextTurns
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker


class Dispatcher:
    """Lets each request wait until it is cancelled or the router stops, or until its worker has decided."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.wakes: dict[str, asyncio.Event] = {}
        self.decide: dict[str, Callable[[], None]] = {}
        """The effects of workers' answers that come only when the router stops."""
        self.continued: list[str] = []

    async def dispatch(self, flight: Flight) -> None:
        await self.wakes.setdefault(flight.key, asyncio.Event()).wait()
        self.decide.get(flight.key, lambda: None)()

    async def redispatch(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        self.continued.append(flight.key)


class Queue:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def check_policy(self, routing: messages.RoutingOptions | None) -> None: ...

    def cancel(self, flight: Flight) -> None:
        self._dispatcher.wakes[flight.key].set()


class Terminals:
    def __init__(self) -> None:
        self.ends: list[tuple[str, str | None]] = []

    def end(self, flight: Flight, error: errors.Error | None) -> None:
        self.ends.append((flight.key, error and str(error.code)))

    def log_end(self, flight: Flight, reason: str) -> None: ...


class Testbed:
    """A router with requests that no worker has; another router takes over those in `accepts`."""

    __test__ = False

    def __init__(self, *names: str, accepts: tuple[str, ...] = ()) -> None:
        self.fleet = fleet_of(card("w1"))
        self.flights = Flights(8, 1_000)
        self.dispatcher, self.terminals = Dispatcher(), Terminals()
        telemetry = FlightTelemetry(RouterMetrics(), tracing.NoopTracer(), RequestLogSettings())
        queue = Queue(self.dispatcher)
        self.ends = RequestEnds()
        parts = (
            self.dispatcher,
            NoLoads(),
            self.terminals,
            free_quota(),
            telemetry,
            self.ends,
            NextTurns(self.fleet, None, None),
        )
        self.lifecycle = RequestLifecycle(self.fleet, self.flights, None, queue, *parts)  # type: ignore[arg-type]
        self.offered: list[str] = []
        self._accepts = accepts
        for name in names:
            self.add(name)

    def add(self, name: str) -> Flight:
        one = flight(name)
        one.prompt_ids = b"1234"
        assert self.lifecycle.adopt(one, None)
        return one

    async def offer(self, flight: Flight) -> bool:
        self.offered.append(flight.request_id)
        await asyncio.sleep(0)
        return flight.request_id in self._accepts

    async def shut_down(self) -> None:
        await asyncio.sleep(0)
        await self.lifecycle.shut_down(self.offer)
        assert len(self.flights) == 0
        self.flights.check_integrity()


async def test_what_waits_is_offered_once_and_ends_only_if_nobody_takes_it() -> None:
    testbed = Testbed("a", "b", accepts=("b",))
    await testbed.shut_down()
    assert sorted(testbed.offered) == ["a", "b"]
    assert testbed.terminals.ends == [("default:a", "shutting_down")]


async def test_a_stream_that_nobody_takes_ends_in_the_loss_of_its_worker() -> None:
    testbed = Testbed()
    testbed.add("a").completion.append(7, seq=0)
    await testbed.shut_down()
    assert testbed.terminals.ends == [("default:a", "worker_lost")]


async def test_a_cancelled_request_is_not_offered() -> None:
    testbed = Testbed()
    testbed.add("a").cancelled = True
    await testbed.shut_down()
    assert (testbed.offered, testbed.terminals.ends) == ([], [("default:a", None)])


async def test_a_cancel_that_names_another_model_changes_nothing() -> None:
    testbed = Testbed("a")
    (one,) = testbed.flights.all()
    await asyncio.sleep(0)
    assert not testbed.lifecycle.cancel(one.key, "another")
    assert not one.cancelled
    assert testbed.lifecycle.cancel(one.key, one.model)
    assert one.cancelled
    await testbed.shut_down()
    assert testbed.offered == []


async def test_a_cancel_that_names_no_model_is_for_any() -> None:
    testbed = Testbed("a")
    (one,) = testbed.flights.all()
    await asyncio.sleep(0)
    assert testbed.lifecycle.cancel(one.key, None)
    await testbed.shut_down()
    assert testbed.offered == []


async def test_a_request_that_a_worker_accepts_meanwhile_is_left_there() -> None:
    testbed = Testbed("a")
    (one,) = testbed.flights.all()
    testbed.dispatcher.decide["default:a"] = lambda: testbed.flights.accept(one, "w1", 0.0)
    await testbed.shut_down()
    assert (testbed.offered, testbed.terminals.ends) == ([], [])


async def test_a_stream_at_a_worker_is_left_there() -> None:
    testbed = Testbed()
    one = flight("a")
    one.prompt_ids, one.is_named = b"1234", True
    assert testbed.lifecycle.adopt(one, known(testbed.fleet))
    await testbed.shut_down()
    assert (testbed.offered, testbed.terminals.ends, testbed.dispatcher.continued) == ([], [], [])


async def test_a_stream_that_a_worker_gives_up_while_others_are_handed_over_is_handed_over_too() -> None:
    testbed = Testbed("a", accepts=("a", "b"))
    other = flight("b")
    other.prompt_ids = b"1234"
    testbed.lifecycle.adopt(other, known(testbed.fleet))
    waiting = testbed.flights.find_flight("default:a")
    assert waiting
    testbed.dispatcher.decide["default:a"] = lambda: testbed.lifecycle.recover(
        other, known(testbed.fleet), is_certain=False
    )
    await testbed.shut_down()
    assert testbed.dispatcher.continued == ["default:b"]
    assert sorted(testbed.offered) == ["a", "b"]
    assert testbed.terminals.ends == []


async def test_a_stream_that_a_worker_gives_up_while_its_guardian_is_awaited_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testbed = Testbed(accepts=("a",))
    testbed.ends.add(lambda end: None)
    one = flight("a")
    one.prompt_ids = b"1234"
    testbed.lifecycle.adopt(one, known(testbed.fleet))

    async def redispatch(flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        await asyncio.sleep(2 * limits.TICK_S)  # asks the worker that may still have it

    monkeypatch.setattr(testbed.dispatcher, "redispatch", redispatch)
    stopping = asyncio.create_task(testbed.shut_down())
    await asyncio.sleep(limits.TICK_S)
    testbed.lifecycle.recover(one, known(testbed.fleet), is_certain=False)
    await stopping
    assert (testbed.offered, testbed.terminals.ends) == (["a"], [])


async def test_a_request_whose_worker_does_not_answer_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenbus.router.requests.lifecycle._HAND_OVER_S", 0.0)
    testbed = Testbed("a")
    await asyncio.sleep(0)
    testbed.dispatcher.wakes.clear()
    testbed.dispatcher.wakes["default:a"] = asyncio.Event()
    await testbed.shut_down()
    assert testbed.terminals.ends == [("default:a", "shutting_down")]


async def test_a_stop_is_known_to_the_dispatcher_before_it_goes_on() -> None:
    testbed = Testbed("a")
    seen: list[bool] = []
    testbed.dispatcher.decide["default:a"] = lambda: seen.append(testbed.dispatcher.is_stopped)
    await testbed.shut_down()
    assert seen == [True]
