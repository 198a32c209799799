"""At a desk tenants take turns, and what one of them brings delays itself."""

import asyncio
import ctypes
import functools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tokenbus.router.requests.fair_executor import FairExecutor

LONG = 400_000


class Bench:
    """A desk whose one thread stands still until a test lets it go on, and what was done there."""

    def __init__(self) -> None:
        self.desk = FairExecutor(1, "test")
        self.gate = threading.Event()
        self.done: list[str] = []
        self.closed = threading.Event()
        self._tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self.desk.run("first", "", 0.0, 1, self.gate.wait))]

    async def bring(
        self, name: str, tenant: str = "a", arrived_at: float = 0.0, num_chars: int = 4
    ) -> "asyncio.Task[None]":
        work = functools.partial(self.done.append, name)
        task = asyncio.create_task(self.desk.run(name, tenant, arrived_at, num_chars, work))
        self._tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def go_on(self) -> list[str]:
        self.gate.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.done


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await asyncio.sleep(0)
    yield bench
    await bench.go_on()
    bench.desk.close(bench.closed.set)
    assert await asyncio.to_thread(bench.closed.wait, 10)


async def test_what_one_tenant_brings_is_done_in_turn(bench: Bench) -> None:
    for at, name in enumerate("xyz"):
        await bench.bring(name, arrived_at=at)
    assert await bench.go_on() == ["x", "y", "z"]


async def test_a_tenant_need_not_wait_for_another_that_was_there_before_with_much(bench: Bench) -> None:
    for number in range(3):
        await bench.bring(f"long{number}", tenant="greedy", num_chars=LONG)
    await bench.bring("sum", tenant="modest", arrived_at=1.0, num_chars=3_000)
    assert await bench.go_on() == ["sum", "long0", "long1", "long2"]


async def test_a_tenants_short_text_need_not_wait_for_long_ones_of_its_own(bench: Bench) -> None:
    for number in range(2):
        await bench.bring(f"long{number}", num_chars=LONG)
    await bench.bring("sum", arrived_at=1.0, num_chars=3_000)
    await bench.bring("late", arrived_at=9.0, num_chars=3_000)
    assert await bench.go_on() == ["sum", "long0", "long1", "late"]


async def test_what_is_cancelled_while_it_waits_is_not_done(bench: Bench) -> None:
    waiting = await bench.bring("x")
    await bench.bring("y")
    waiting.cancel()
    assert await bench.go_on() == ["y"]


async def test_what_fails_gives_its_turn_to_the_next(bench: Bench) -> None:
    async def failing() -> None:
        await bench.desk.run("bad", "a", 0.0, 1, lambda: 1 // 0)

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await bench.bring("y")
    assert await bench.go_on() == ["y"]
    with pytest.raises(ZeroDivisionError):
        await task


async def test_a_desk_that_is_closed_does_what_waits_and_then_one_last_thing() -> None:
    desk, gate, done = FairExecutor(1, "test"), threading.Event(), asyncio.Event()
    order: list[str] = []
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(desk.run("first", "", 0.0, 1, gate.wait))
    second = asyncio.create_task(desk.run("second", "", 0.0, 1, lambda: order.append("second")))
    await asyncio.sleep(0)

    def last() -> None:
        order.append("last")
        loop.call_soon_threadsafe(done.set)

    desk.close(last)
    gate.set()
    await asyncio.gather(first, second, done.wait())
    assert order == ["second", "last"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
async def test_what_a_large_text_took_of_memory_is_given_back(bench: Bench) -> None:
    def take() -> bytearray:
        return [bytearray(2_000) for _ in range(20_000)][-1]  # it lies above what becomes free, and pins it

    bench.gate.set()
    before = _resident_bytes()
    pin = await bench.desk.run("large", "a", 0.0, LONG, take)
    assert _resident_bytes() - before < 20_000_000, len(pin)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096
