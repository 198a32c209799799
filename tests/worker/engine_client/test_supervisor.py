"""The backoff before an engine is restarted grows while engines die early, up to a limit."""

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import thread_engine
from tokenbus.worker.contract import contract
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.supervisor import (
    HEALTHY_AFTER_S,
    INITIAL_BACKOFF_S,
    MAX_BACKOFF_S,
    EngineSupervisor,
    next_backoff,
)


def test_an_engine_that_dies_early_doubles_the_backoff() -> None:
    assert next_backoff(0.1, uptime_s=0.0) == pytest.approx(0.2)
    assert next_backoff(3.0, uptime_s=HEALTHY_AFTER_S - 0.001) == pytest.approx(6.0)


def test_an_engine_that_lived_long_enough_resets_the_backoff() -> None:
    assert next_backoff(MAX_BACKOFF_S, uptime_s=HEALTHY_AFTER_S) == INITIAL_BACKOFF_S
    assert next_backoff(INITIAL_BACKOFF_S, uptime_s=10 * HEALTHY_AFTER_S) == INITIAL_BACKOFF_S


@pytest.mark.parametrize("backoff_s", [MAX_BACKOFF_S / 2, MAX_BACKOFF_S / 2 + 0.001, MAX_BACKOFF_S])
def test_the_backoff_never_exceeds_its_maximum(backoff_s: float) -> None:
    assert next_backoff(backoff_s, uptime_s=0.0) == MAX_BACKOFF_S


def test_the_backoff_grows_to_its_maximum_and_stays_there() -> None:
    pauses = [INITIAL_BACKOFF_S]
    while len(pauses) < 12:
        pauses.append(next_backoff(pauses[-1], uptime_s=1.0))
    assert pauses == sorted(pauses)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert pauses[-3:] == [MAX_BACKOFF_S] * 3


class Listener(EngineListener):
    """Waits for an engine to serve."""

    def __init__(self) -> None:
        self.serves = asyncio.Event()

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        self.serves.set()

    def engine_died(self) -> None:
        self.serves.clear()


async def test_an_engine_that_is_cleaned_up_has_not_died_and_is_not_restarted() -> None:
    listener = Listener()
    engine = thread_engine(lambda _: ArithmeticRunner())
    engine.listener = listener
    supervisor = EngineSupervisor(engine, "w", 30.0)
    with capture_logs() as lines:
        life = asyncio.create_task(supervisor.run())
        await listener.serves.wait()
        await supervisor.cleanup()
        async with asyncio.timeout(60):
            await life
    assert "engine_died" not in [line["event"] for line in lines]
    assert supervisor.restarts == 0
