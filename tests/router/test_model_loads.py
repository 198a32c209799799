"""A router has models loaded, and holds requests meanwhile."""

import asyncio
from collections.abc import Callable

import pytest

from tests.router.builders import DRAINING, READY, STARTING, card, events, fleet_of, named
from tokenbus.protocol.bus.bus import NoRespondersError
from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.worker_client import AnyWorker
from tokenbus.router.requests.queueing import model_loads
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.workers.worker import Worker


class Queue:
    """A placement queue without requests."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, errors.Code]] = []

    def __len__(self) -> int:
        return 0

    def depths(self) -> dict[str, int]:
        return {}

    def end_all(self, model: str, outcome: errors.Error) -> None:
        self.ended.append((model, outcome.code))


class Workers:
    """Answers each load by what the test says."""

    def __init__(self, answer: Callable[[str], internal.ControlReply]) -> None:
        self._answer = answer
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()

    async def call(
        self, card: messages.Card, op: object, message: internal.Control, timeout_s: float, headers: object
    ) -> object:
        assert (message.op, message.model) == ("load", None)
        self.asked.append(card.worker_id)
        self.was_asked.set()
        return self._answer(card.worker_id)


def loads(
    fleet: Fleet, answer: Callable[[str], internal.ControlReply], hold_s: float = 0.0
) -> tuple[ModelLoads, Workers]:
    workers = Workers(answer)
    any_worker = AnyWorker(fleet, workers)  # type: ignore[arg-type]
    return ModelLoads(fleet, any_worker, Queue(), hold_s), workers  # type: ignore[arg-type]


def refuse(worker_id: str) -> internal.ControlReply:
    error = errors.make_error(errors.Code.INSUFFICIENT_MEMORY, f"{worker_id} is full")
    return internal.ControlReply(ok=False, error=error)


def load_half(worker_id: str) -> internal.ControlReply:
    return internal.ControlReply(ok=True, progress=0.5)


def loadable(worker_id: str) -> messages.Card:
    return card(worker_id, state=DRAINING, loadable=True, features=[])


async def test_a_model_that_a_worker_has_loaded_is_not_waited_for() -> None:
    found, workers = loads(fleet_of(card("w1"), loadable("w2")), refuse)
    assert await found.wait_served("demo", None) is False
    assert workers.asked == []


async def test_one_worker_is_asked_for_all_requests_and_they_go_on_when_it_serves() -> None:
    fleet = fleet_of(loadable("w1"), loadable("w2"))
    found, workers = loads(fleet, load_half)
    waiting = [asyncio.create_task(found.wait_served("demo", None)) for _ in range(3)]
    await workers.was_asked.wait()
    assert found.num_held() == {"demo": 3}
    for _ in range(3):
        found.check()
        await asyncio.sleep(0)
    assert len(workers.asked) == 1
    assert found.progress_of("demo") == 0.5
    (asked,) = workers.asked
    fleet.apply_card(card(asked, state=STARTING), 0.0)
    found.check()
    assert not any(task.done() for task in waiting)
    fleet.apply_card(card(asked, state=READY), 0.0)
    found.check()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert found.num_held() == {}
    assert found.progress_of("demo") is None


async def test_routers_agree_on_the_worker_and_join_a_load_in_progress() -> None:
    names = [f"w{number}" for number in range(20)]
    one, other = fleet_of(*map(loadable, names)), fleet_of(*map(loadable, reversed(names)))
    first = named(one.model("demo").loaders())
    assert first == named(other.model("demo").loaders())
    last = first[-1]
    one.apply_card(card(last, state=STARTING), 0.0)
    assert one.model("demo").loaders()[0].card.worker_id == last


async def test_all_workers_are_asked_before_a_request_ends_with_the_last_refusal() -> None:
    fleet = fleet_of(loadable("w1"), loadable("w2"))
    found, workers = loads(fleet, refuse)

    async def check() -> None:
        while True:
            await asyncio.sleep(0)
            found.check()

    checking = asyncio.create_task(check())
    with pytest.raises(errors.RequestError) as raised:
        await found.wait_served("demo", None)
    checking.cancel()
    assert sorted(workers.asked) == ["w1", "w2"]
    assert raised.value.error.code is errors.Code.INSUFFICIENT_MEMORY
    assert raised.value.error.message == f"{workers.asked[-1]} is full"


async def check_until(found: ModelLoads, is_over: Callable[[], bool]) -> None:
    while not is_over():
        found.check()
        await asyncio.sleep(0)


async def test_a_worker_that_has_left_the_bus_has_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loads, "_ASK_INTERVAL_S", 0.0)

    def have_left(worker_id: str) -> internal.ControlReply:
        raise NoRespondersError(worker_id)

    found, workers = loads(fleet_of(loadable("w1")), have_left)
    waiting = asyncio.create_task(found.wait_served("demo", None))
    await check_until(found, lambda: len(workers.asked) >= 9)
    assert not waiting.done()
    waiting.cancel()


async def test_a_worker_that_is_there_and_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loads, "_ASK_INTERVAL_S", 0.0)

    def be_silent(worker_id: str) -> internal.ControlReply:
        raise TimeoutError(worker_id)

    found, workers = loads(fleet_of(loadable("w1")), be_silent)
    waiting = asyncio.create_task(found.wait_served("demo", None))
    await check_until(found, waiting.done)
    with pytest.raises(errors.RequestError) as raised:
        await waiting
    assert raised.value.error.code is errors.Code.NO_WORKER
    assert len(workers.asked) >= 4


async def test_the_deadline_and_a_cancel_end_the_wait() -> None:
    found, _ = loads(fleet_of(loadable("w1")), load_half)
    with pytest.raises(errors.RequestError) as raised:
        await found.wait_served("demo", 0.0)
    assert raised.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert await found.wait_served("demo", None, lambda: True) is False
    assert found.num_held() == {}


async def test_without_any_worker_only_known_models_are_waited_for_and_only_if_requests_are_held() -> None:
    fleet = Fleet(-1_000.0, ("expected",))
    found, _ = loads(fleet, refuse)
    assert await found.wait_served("expected", None) is False
    found, _ = loads(fleet, refuse, hold_s=60.0)
    assert await found.wait_served("unknown", None) is False
    waiting = asyncio.create_task(found.wait_served("expected", None))
    await asyncio.sleep(0)
    assert found.num_held() == {"expected": 1}
    fleet.apply_card(card("w1", model="expected"), 0.0)
    found.check()
    assert await waiting is True


async def test_a_router_that_stops_gives_its_held_requests_up() -> None:
    found, workers = loads(fleet_of(loadable("w1")), load_half)
    waiting = asyncio.create_task(found.wait_served("demo", None))
    await workers.was_asked.wait()
    found.close()
    with pytest.raises(errors.RequestError) as raised:
        await waiting
    assert raised.value.error.code is errors.Code.SHUTTING_DOWN


def test_a_loadable_worker_takes_no_request_but_may_soon() -> None:
    fleet = fleet_of(loadable("w1"))
    fleet.apply_events("demo", events("w1", 0, state=DRAINING), 0.0)
    worker = next(iter(fleet.workers_of("demo")))
    assert isinstance(worker, Worker)
    assert (worker.may_recover, worker.is_loadable, worker.has_loaded) == (True, True, False)
    assert fleet.model("demo").eligible(0.0) == []
