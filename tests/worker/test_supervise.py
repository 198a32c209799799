"""The pause before an engine is started again grows while engines die young, up to a limit."""

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import thread_engine
from tokenbus.worker import contract
from tokenbus.worker.engine_client.supervise import (
    FIRST_PAUSE_S,
    HEALTHY_AFTER_S,
    LONGEST_PAUSE_S,
    Supervisor,
    next_pause,
)


def test_an_engine_that_dies_young_doubles_the_pause() -> None:
    assert next_pause(0.1, lived_s=0.0) == pytest.approx(0.2)
    assert next_pause(3.0, lived_s=HEALTHY_AFTER_S - 0.001) == pytest.approx(6.0)


def test_an_engine_that_has_lived_long_enough_earns_the_first_pause_again() -> None:
    assert next_pause(LONGEST_PAUSE_S, lived_s=HEALTHY_AFTER_S) == FIRST_PAUSE_S
    assert next_pause(FIRST_PAUSE_S, lived_s=10 * HEALTHY_AFTER_S) == FIRST_PAUSE_S


@pytest.mark.parametrize("pause_s", [LONGEST_PAUSE_S / 2, LONGEST_PAUSE_S / 2 + 0.001, LONGEST_PAUSE_S])
def test_the_pause_never_exceeds_the_longest(pause_s: float) -> None:
    assert next_pause(pause_s, lived_s=0.0) == LONGEST_PAUSE_S


def test_pauses_grow_from_the_first_to_the_longest_and_stay_there() -> None:
    pauses = [FIRST_PAUSE_S]
    while len(pauses) < 12:
        pauses.append(next_pause(pauses[-1], lived_s=1.0))
    assert pauses == sorted(pauses)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert pauses[-3:] == [LONGEST_PAUSE_S] * 3


class Listener:
    """Waits for an engine to serve."""

    def __init__(self) -> None:
        self.serves = asyncio.Event()

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        self.serves.set()

    def engine_died(self) -> None:
        self.serves.clear()


async def test_an_engine_that_is_taken_down_has_not_died_and_is_not_started_again() -> None:
    listener = Listener()
    supervisor = Supervisor(lambda: thread_engine(lambda _: ArithmeticRunner()), "w", listener, 30.0)
    with capture_logs() as lines:
        life = asyncio.create_task(supervisor.run())
        await listener.serves.wait()
        await supervisor.cleanup()
        async with asyncio.timeout(60):
            await life
    assert "engine_died" not in [line["event"] for line in lines]
    assert supervisor.restarts == 0
