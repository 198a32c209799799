"""SIGHUP: what is read last is what a process serves with."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tokenbus.protocol.process import reload


@pytest.fixture(autouse=True)
def _no_handler_afterwards() -> Iterator[None]:
    yield
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Slow:
    """Settings that take as long to adopt as a test wants."""

    def __init__(self) -> None:
        self.number = 0
        self.adopted: list[int] = []
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    def again(self) -> int:
        self.number += 1
        return self.number

    async def apply(self, number: int) -> None:
        self.begun.set()
        if number == 1:
            await self.may_end.wait()
        self.adopted.append(number)

    async def until(self, number: int) -> None:
        async with asyncio.timeout(10):
            while number not in self.adopted:
                await asyncio.sleep(0.001)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


async def test_of_two_signals_in_a_row_the_second_is_adopted_last() -> None:
    slow = Slow()
    reload.on_hangup(slow.again, slow.apply)
    hang_up()
    await asyncio.wait_for(slow.begun.wait(), 10)
    hang_up()
    await asyncio.sleep(0.01)
    slow.may_end.set()
    await slow.until(2)
    assert slow.adopted == [1, 2]


async def test_what_can_not_be_adopted_is_said_and_the_next_signal_is_heard() -> None:
    adopted: list[str] = []
    files = iter(["broken", "wrong", "right"])

    def again() -> str:
        if (settings := next(files)) == "wrong":
            raise ValueError("it is wrong")
        return settings

    async def apply(settings: str) -> None:
        if settings == "broken":
            raise ConnectionError("the broker is away")
        adopted.append(settings)

    reload.on_hangup(again, apply)
    with capture_logs() as lines:
        for count in (1, 2):
            hang_up()
            async with asyncio.timeout(10):
                while len(lines) < count:
                    await asyncio.sleep(0.001)
        hang_up()
        async with asyncio.timeout(10):
            while not adopted:
                await asyncio.sleep(0.001)
    assert [(line["event"], line["error"]) for line in lines] == [
        ("settings_not_applied", "ConnectionError: the broker is away"),
        ("settings_refused", "it is wrong"),
    ]
