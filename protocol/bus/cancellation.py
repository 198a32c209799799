"""Keeps a task's cancellation from being lost."""

import asyncio
from types import TracebackType


class CancellationGuard:
    """Raises CancelledError at its end if the task was cancelled within it, and what it awaited did not say so.

    Before Python 3.12 `asyncio.wait_for` returns a result that comes together with a cancel as if there had been none,
    and nats-py awaits everything by `wait_for`."""

    def __enter__(self) -> "CancellationGuard":
        self._before = _num_cancellations()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            self.check()

    def check(self) -> None:
        """Raises CancelledError if the task was cancelled since the beginning."""
        if _num_cancellations() > self._before:
            raise asyncio.CancelledError


def _num_cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
