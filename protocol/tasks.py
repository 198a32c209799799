"""Starts tasks so that none fails silently.

An exception that leaves a task is kept until the task is awaited, and is lost if it never is. So each task is one of
two kinds, and only this module starts any."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tokenbus.protocol import late_logger

ResultT = TypeVar("ResultT")


class StrayCancelError(RuntimeError):
    """A task was cancelled by something it awaited, not by its owner: a failure like any other."""


_running: set[asyncio.Task[None]] = set()
"""Running background tasks: the event loop itself holds only weak references."""


def awaited(work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Starts a task that its owner awaits and whose result or error it thus learns."""
    return asyncio.get_running_loop().create_task(work)


def background(
    name: str, work: Coroutine[Any, Any, Any], on_failure: Callable[[Exception], None] | None = None
) -> asyncio.Task[None]:
    """Starts a task whose result is not awaited. The task never raises, but it can be cancelled.

    An error that leaves `work` is logged as `task_failed` with the name, and then passed to `on_failure`, which ends
    what waits for the task."""
    task = asyncio.get_running_loop().create_task(_run(name, work, on_failure), name=name)
    _running.add(task)
    task.add_done_callback(_running.discard)
    task.add_done_callback(lambda _: work.close())  # one that was cancelled at once never started
    return task


async def _run(name: str, work: Coroutine[Any, Any, Any], on_failure: Callable[[Exception], None] | None) -> None:
    failure: Exception
    try:
        await work
        return
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failure = StrayCancelError("it was cancelled by what it awaited")
    except Exception as error:  # outermost frame of the task
        failure = error
    late_logger.get_logger().error("task_failed", task=name, exc_info=failure)
    if on_failure is not None:
        on_failure(failure)


def log_uncaught(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler: logs what a callback raises, or an awaited task's error that was never
    retrieved."""
    late_logger.get_logger().error("callback_failed", error=context["message"], exc_info=context.get("exception"))
