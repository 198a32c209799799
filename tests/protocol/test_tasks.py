"""No task dies in silence: its error is logged, and whoever waits for it is told."""

import asyncio
import contextlib
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
    assert [(line["event"], line["task"], line["exc_info"]) for line in lines] == [("task_failed", "measure", told[0])]


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


async def test_a_background_task_that_is_cancelled_by_what_it_awaits_has_failed() -> None:
    told: list[Exception] = []
    awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await asyncio.shield(awaited)

    task = tasks.background("wait", wait(), told.append)
    awaited.cancel()
    await asyncio.wait([task])
    assert [type(error) for error in told] == [tasks.StrayCancelError]


async def test_a_time_limit_within_a_task_is_no_cancellation_by_its_owner() -> None:
    told: list[Exception] = []

    async def wait() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0):
                await asyncio.Event().wait()
        raise asyncio.CancelledError

    await asyncio.wait([tasks.background("wait", wait(), told.append)])
    assert [type(error) for error in told] == [tasks.StrayCancelError]


async def test_what_a_callback_raises_is_logged_as_an_event() -> None:
    loop, logged = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(tasks.log_uncaught)
    with structlog.testing.capture_logs() as lines:
        loop.call_soon({}.pop, "a bug")
        loop.call_soon(logged.set)
        await logged.wait()
    assert [(line["event"], type(line["exc_info"])) for line in lines] == [("callback_failed", KeyError)]
