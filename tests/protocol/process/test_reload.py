"""SIGHUP: the settings that are read last are those that a process serves with."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tokenbus.protocol.process import signals


@pytest.fixture(autouse=True)
def _no_handler_afterwards() -> Iterator[None]:
    yield
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


async def test_of_two_signals_in_a_row_the_second_is_applied_last() -> None:
    numbers = iter([1, 2])
    begun, may_end = asyncio.Event(), asyncio.Event()
    applied: asyncio.Queue[int] = asyncio.Queue()

    async def apply(number: int) -> None:
        begun.set()
        await may_end.wait()
        applied.put_nowait(number)

    signals.on_hangup(lambda: next(numbers), apply)
    async with asyncio.timeout(10):
        hang_up()
        await begun.wait()
        hang_up()
        may_end.set()
        assert [await applied.get(), await applied.get()] == [1, 2]


async def test_settings_that_can_not_be_applied_are_logged_and_the_next_signal_is_heard() -> None:
    files = iter(["broken", "wrong", "right"])
    applied: asyncio.Queue[str] = asyncio.Queue()
    read: asyncio.Queue[str] = asyncio.Queue()

    def read_settings() -> str:
        settings = next(files)
        read.put_nowait(settings)
        if settings == "wrong":
            raise ValueError("it is wrong")
        return settings

    async def apply(settings: str) -> None:
        if settings == "broken":
            raise ConnectionError("the broker is away")
        applied.put_nowait(settings)

    signals.on_hangup(read_settings, apply)
    with capture_logs() as lines:
        async with asyncio.timeout(10):
            for _ in range(3):  # each signal is sent once the one before it has been taken: several at once are one
                hang_up()
                await read.get()
            assert await applied.get() == "right"
    assert [(line["event"], line["error"]) for line in lines] == [
        ("settings_not_applied", "ConnectionError: the broker is away"),
        ("settings_refused", "it is wrong"),
    ]
