"""A call that workers keep no state for is answered by any of them, and asked again if it could not be answered."""

from collections.abc import Callable, Iterator

import pytest

from tests.router.builders import RESTARTING, card, events, fleet_of, known
from tests.sim.world import Process, world
from tokenbus.protocol.wire import errors
from tokenbus.router.requests.flights.worker_client import AnyWorker
from tokenbus.router.workers.worker import Worker


class Calls:
    """Calls of the workers w1 and so on, which fail in turn with these errors and then succeed."""

    def __init__(self, *codes: errors.Code, num_workers: int = 1) -> None:
        names = [f"w{number + 1}" for number in range(num_workers)]
        self.fleet = fleet_of(*map(card, names))
        self._workers = [known(self.fleet, name) for name in names]
        self._codes = list(codes)
        self.asked: list[str] = []
        self.before: Callable[[Worker], None] = lambda worker: None
        """Called before each attempt."""

    async def result(self, *, may_crash: bool = False) -> str:
        any_worker = AnyWorker(self.fleet, None)  # type: ignore[arg-type]
        return await any_worker.first_result("demo", lambda: self._workers, self._attempt, may_crash=may_crash)

    async def _attempt(self, worker: Worker) -> str:
        self.before(worker)
        self.asked.append(worker.card.worker_id)
        if self._codes:
            raise errors.request_error(self._codes.pop(0))
        return worker.card.worker_id


@pytest.fixture
def process() -> Iterator[Process]:
    with world(seed=1) as made:
        yield made.process("router")


@pytest.mark.parametrize("code", [errors.Code.WORKER_LOST, errors.Code.NO_WORKER])
def test_a_worker_that_has_lost_its_engine_is_asked_again(process: Process, code: errors.Code) -> None:
    calls = Calls(code)
    assert process.do(calls.result()) == "w1"
    assert calls.asked == ["w1", "w1"]


def test_it_is_asked_until_its_next_engine_is_ready(process: Process) -> None:
    calls = Calls(*[errors.Code.NO_WORKER] * 20)
    known(calls.fleet).state = RESTARTING
    assert process.do(calls.result()) == "w1"
    assert len(calls.asked) == 21


def test_another_worker_is_asked_before_it(process: Process) -> None:
    calls = Calls(errors.Code.NO_WORKER, num_workers=2)
    assert process.do(calls.result()) == "w2"
    assert calls.asked == ["w1", "w2"]


@pytest.mark.parametrize(
    ("code", "num_workers", "may_crash", "asked"),
    [
        (errors.Code.OVERLOADED, 1, False, 1),
        (errors.Code.INTERNAL, 9, False, 9),
        (errors.Code.WORKER_LOST, 9, True, 3),
        (errors.Code.WORKER_LOST, 1, True, 3),
        (errors.Code.NO_WORKER, 1, False, 4),
        (errors.Code.UNSUPPORTED, 9, False, 1),
    ],
)
def test_refusals_end_the_call(
    process: Process, code: errors.Code, num_workers: int, may_crash: bool, asked: int
) -> None:
    calls = Calls(*[code] * 99, num_workers=num_workers)
    with pytest.raises(errors.RequestError) as raised:
        process.do(calls.result(may_crash=may_crash))
    assert (raised.value.error.code, len(calls.asked)) == (code, asked)


def test_a_worker_that_has_gone_costs_no_try_unless_it_says_that_it_is_back(process: Process) -> None:
    calls = Calls(*[errors.Code.NO_WORKER] * 9)

    def leave(worker: Worker) -> None:
        calls.fleet.mark_no_responders(worker.card)

    calls.before = leave
    with pytest.raises(errors.RequestError):
        process.do(calls.result(may_crash=True))
    assert len(calls.asked) == 4


def test_nothing_is_waited_for_once_no_worker_may_come_back(process: Process) -> None:
    calls = Calls(errors.Code.NO_WORKER)

    def drain(worker: Worker) -> None:
        calls.fleet.apply_events("demo", events(state=worker.state.DRAINING), 0.0)

    calls.before = drain
    with pytest.raises(errors.RequestError):
        process.do(calls.result())
    assert len(calls.asked) == 1
