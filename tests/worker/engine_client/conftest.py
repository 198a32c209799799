"""Fixtures of the tests of the engine's client."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.arithmetic import ArithmeticRunner
from tests.support.engine_lives import Begin, Life


@pytest.fixture
async def life() -> AsyncIterator[Begin]:
    """Begins lives, and ends them with the test."""
    begun: list[tuple[Life, asyncio.Task[None]]] = []

    def begin(runners: Sequence[ArithmeticRunner]) -> Life:
        one = Life(runners)
        begun.append((one, asyncio.create_task(one.supervisor.run())))
        return one

    yield begin
    for one, task in begun:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.supervisor.cleanup()
