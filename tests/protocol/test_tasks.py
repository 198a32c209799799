"""No task dies in silence: its error is logged, and whoever waits for it is told."""

import asyncio
import gc
import weakref

import pytest
import structlog

from tokenbus.protocol import tasks


async def fail() -> None:
    raise KeyError("q6_0")


async def test_an_error_of_a_background_task_is_logged_and_told_and_raised_nowhere() -> None:
    told: list[Exception] = []
    with structlog.testing.capture_logs() as lines:
        await tasks.background("measure", fail(), told.append)
    assert [type(error) for error in told] == [KeyError]
    assert [(line["event"], line["task"], line["exc_info"]) for line in lines] == [("task_failed", "measure", True)]


async def test_a_background_task_that_nobody_holds_runs_to_its_end() -> None:
    done, proceed = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await proceed.wait()
        done.set()

    task = weakref.ref(tasks.background("work", work()))
    await asyncio.sleep(0)
    gc.collect()
    proceed.set()
    async with asyncio.timeout(5):
        await done.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert task() is None, "and is forgotten then"


async def test_a_background_task_that_is_cancelled_has_not_failed() -> None:
    told: list[Exception] = []
    with structlog.testing.capture_logs() as lines:
        task = tasks.background("wait", asyncio.Event().wait(), told.append)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert not told
    assert not lines


async def test_a_background_task_may_be_cancelled_before_it_begins() -> None:
    task = tasks.background("fail", fail())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_an_awaited_task_gives_its_error_to_its_owner() -> None:
    with pytest.raises(KeyError):
        await tasks.awaited(fail())
