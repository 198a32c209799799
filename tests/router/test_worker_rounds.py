"""What workers are asked beside requests is asked again if an engine was lost before it could answer."""

import time

import pytest

from tests.router.builders import card, fleet_of
from tokenbus.protocol.wire import errors
from tokenbus.router.requests.flights.worker_client import workers_for
from tokenbus.router.requests.tokenization.worker_rounds import WorkerRounds
from tokenbus.router.workers.worker import Worker


class Attempts:
    """Fails in turn with these errors, and then succeeds."""

    def __init__(self, *codes: errors.Code) -> None:
        self._fleet = fleet_of(card("w1"))
        self._codes = list(codes)
        self.count = 0

    async def run(self) -> str:
        rounds = WorkerRounds(self._fleet, None)  # type: ignore[arg-type]
        return await rounds.run("demo", workers_for(self._fleet, "demo", time.monotonic()), self._attempt)

    async def _attempt(self, some: list[Worker]) -> str:
        self.count += 1
        if self._codes:
            raise errors.request_error(self._codes.pop(0))
        return some[0].card.worker_id


@pytest.mark.parametrize("code", [errors.Code.WORKER_LOST, errors.Code.NO_WORKER])
async def test_a_worker_that_has_lost_its_engine_is_asked_again(code: errors.Code) -> None:
    attempts = Attempts(code)
    assert await attempts.run() == "w1"
    assert attempts.count == 2


async def test_a_worker_that_answers_with_another_error_is_not_asked_again() -> None:
    attempts = Attempts(errors.Code.OVERLOADED)
    with pytest.raises(errors.RequestError) as raised:
        await attempts.run()
    assert (raised.value.error.code, attempts.count) == (errors.Code.OVERLOADED, 1)
