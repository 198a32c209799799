"""Keeps a task's cancellation from getting lost in nats-py.

Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives together with the result, and nats-py awaits
everything by `wait_for`.
"""

import asyncio
from types import TracebackType


class CancellationGuard:
    """A context manager that raises CancelledError at its end if the task was cancelled inside without noticing."""

    def __enter__(self) -> "CancellationGuard":
        self._before = _num_cancellations()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Another exception may hide the cancellation just as a result does.
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            self.check()

    def check(self) -> None:
        """Raises CancelledError if the task has been cancelled since the guard was entered."""
        if _num_cancellations() > self._before:
            raise asyncio.CancelledError


def _num_cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
