"""A fair executor serves tenants in turn, so that a tenant with much work only delays itself."""

import asyncio
import ctypes
import functools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tokenbus.router.requests.tokenization.fair_executor import FairExecutor

LONG = 400_000


class Gated:
    """An executor whose one thread is blocked until `open`, and the names of the jobs it has run."""

    def __init__(self) -> None:
        self.executor = FairExecutor(1, "test")
        self.gate = threading.Event()
        self.done: list[str] = []
        self.closed = threading.Event()
        self._tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self.executor.run("first", "", 0.0, 1, self.gate.wait))
        ]

    async def submit(
        self, name: str, tenant: str = "a", arrived_at: float = 0.0, num_chars: int = 4
    ) -> "asyncio.Task[None]":
        work = functools.partial(self.done.append, name)
        task = asyncio.create_task(self.executor.run(name, tenant, arrived_at, num_chars, work))
        self._tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def open(self) -> list[str]:
        self.gate.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.done


@pytest.fixture
async def gated() -> AsyncIterator[Gated]:
    gated = Gated()
    await asyncio.sleep(0)
    yield gated
    await gated.open()
    gated.executor.close(gated.closed.set)
    assert await asyncio.to_thread(gated.closed.wait, 10)


async def test_jobs_of_one_tenant_run_in_order_of_arrival(gated: Gated) -> None:
    for at, name in enumerate("xyz"):
        await gated.submit(name, arrived_at=at)
    assert await gated.open() == ["x", "y", "z"]


async def test_a_tenant_does_not_wait_for_all_the_jobs_of_one_that_came_earlier(gated: Gated) -> None:
    for number in range(3):
        await gated.submit(f"long{number}", tenant="greedy", num_chars=LONG)
    await gated.submit("sum", tenant="modest", arrived_at=1.0, num_chars=3_000)
    assert await gated.open() == ["sum", "long0", "long1", "long2"]


async def test_a_short_text_overtakes_long_ones_of_the_same_tenant(gated: Gated) -> None:
    for number in range(2):
        await gated.submit(f"long{number}", num_chars=LONG)
    await gated.submit("sum", arrived_at=1.0, num_chars=3_000)
    await gated.submit("late", arrived_at=9.0, num_chars=3_000)
    assert await gated.open() == ["sum", "long0", "long1", "late"]


async def test_a_job_cancelled_while_it_waits_does_not_run(gated: Gated) -> None:
    waiting = await gated.submit("x")
    await gated.submit("y")
    waiting.cancel()
    assert await gated.open() == ["y"]


async def test_a_job_cancelled_while_it_works_keeps_its_place_until_its_thread_is_free(gated: Gated) -> None:
    began, end = threading.Event(), threading.Event()
    executor = FairExecutor(1, "test")

    def work() -> None:
        began.set()
        end.wait()

    working = asyncio.create_task(executor.run("long", "a", 0.0, 1, work))
    await asyncio.to_thread(began.wait)
    working.cancel()
    await asyncio.wait([working])
    waiting = asyncio.create_task(executor.run("next", "a", 0.0, 1, lambda: "done"))
    await asyncio.sleep(0)
    assert "1 waiting, 0 of 1 threads free" in repr(executor)
    end.set()
    assert await waiting == "done"
    closed = threading.Event()
    executor.close(closed.set)
    assert await asyncio.to_thread(closed.wait, 10)


async def test_a_failed_job_frees_its_thread(gated: Gated) -> None:
    async def failing() -> None:
        await gated.executor.run("bad", "a", 0.0, 1, lambda: 1 // 0)

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await gated.submit("y")
    assert await gated.open() == ["y"]
    with pytest.raises(ZeroDivisionError):
        await task


async def test_close_finishes_the_queued_jobs_then_calls_back() -> None:
    executor, gate, done = FairExecutor(1, "test"), threading.Event(), asyncio.Event()
    order: list[str] = []
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(executor.run("first", "", 0.0, 1, gate.wait))
    second = asyncio.create_task(executor.run("second", "", 0.0, 1, lambda: order.append("second")))
    await asyncio.sleep(0)

    def last() -> None:
        order.append("last")
        loop.call_soon_threadsafe(done.set)

    executor.close(last)
    gate.set()
    await asyncio.gather(first, second, done.wait())
    assert order == ["second", "last"]


async def test_what_is_raised_after_the_last_job_is_logged() -> None:
    executor = FairExecutor(1, "test")
    with capture_logs() as lines:
        executor.close(lambda: print({}["missing"]))
        while not lines:
            await asyncio.sleep(0)
    assert [(line["event"], line["task"]) for line in lines] == [("task_failed", "close")]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
async def test_memory_of_a_large_text_is_returned_to_the_system(gated: Gated) -> None:
    def take() -> bytearray:
        return [bytearray(2_000) for _ in range(20_000)][-1]  # it lies above what becomes free, and pins it

    gated.gate.set()
    before = _resident_bytes()
    pin = await gated.executor.run("large", "a", 0.0, LONG, take)
    assert _resident_bytes() - before < 20_000_000, len(pin)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096
