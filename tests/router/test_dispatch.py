"""A request whose worker is lost goes on elsewhere only if this router still has all that another worker needs."""

import pytest

from tests.router.builders import card, fleet_of, flight, known
from tokenbus.protocol.wire import errors, subjects
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.requests.attempts import Revocation
from tokenbus.router.requests.dispatch import Dispatcher
from tokenbus.router.requests.flight import Flight


class Attempts:
    """Answers as a worker does that has not sampled anything yet."""

    async def revoke(self, flight: Flight, worker: Worker) -> Revocation:
        return Revocation.DROPPED

    def move(self, flight: Flight, address: subjects.WorkerAddress, attempt: int) -> None:
        raise AssertionError("it can't go on elsewhere")


async def test_a_dropped_request_whose_prompt_was_forgotten_for_want_of_memory_is_lost() -> None:
    fleet = fleet_of(card("w1"))
    dispatcher = Dispatcher(fleet, None, Attempts(), RouterMetrics(), 60.0)  # type: ignore[arg-type]
    one = flight("r1")
    assert one.prompt_ids is None
    with pytest.raises(errors.RequestError) as refused:
        await dispatcher.redispatch(one, known(fleet), is_certain=False)
    assert refused.value.error.code is errors.Code.WORKER_LOST
