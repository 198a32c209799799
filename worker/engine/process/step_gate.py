"""The step gate lets the step loops of one process step concurrently, or one of them alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StepGate:
    """Counts the steps in progress of loops that share a process and its device. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_stepping = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<StepGate{' closed' if self._is_closed else ''}, {self._num_stepping} stepping>"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Encloses one step; waits while another loop has the device to itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_stepping += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_stepping -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Reserves the device for the caller: returns once no step is in progress; others wait at their next one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True  # first: else new steps could begin forever
            self._changed.wait_for(lambda: not self._num_stepping)

    def open(self) -> None:
        """Lets the other loops step again."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()
