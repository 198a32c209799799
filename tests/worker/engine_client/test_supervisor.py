"""The backoff before an engine is restarted grows while engines die early, up to a limit."""

import asyncio
import errno
import os

import pytest
from structlog.testing import capture_logs

from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import ThreadLink, thread_engine
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineLink, EngineProcess
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


async def test_if_no_process_can_be_started_for_now_an_engine_that_has_served_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    process, listener, links = EngineProcess(), Listener(), list[ThreadLink | None]()

    async def launch() -> EngineLink:
        links.append(ThreadLink(lambda _: ArithmeticRunner()) if len(links) != 1 else None)
        return links[-1] or await process.open(EngineSettings(model="any"))

    supervisor = EngineSupervisor(EngineClient(launch, 0, listener), "w", 30.0)
    with capture_logs() as lines:
        life = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(60):
            await listener.serves.wait()
            assert links[0] is not None
            links[0].kill()
            while len(links) < 3:
                assert not life.done()
                await asyncio.sleep(0.01)
            await listener.serves.wait()
            await supervisor.cleanup()
            await life
    reasons = [line["reason"] for line in lines if line["event"] == "engine_died"]
    assert reasons == ["the loop ended", "no engine process can be started: [Errno 12] Cannot allocate memory"]
