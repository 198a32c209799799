"""Binds a child process to the life of its parent, so that a killed `up` leaves nothing running."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """To be called in the child between fork and exec; from then on it gets SIGTERM when its parent ends.

    The kernel binds it to the forking thread, so the parent must start it from its main thread. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """The same for a child that has been started already, by the main thread of that process."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before it could be bound to
        os._exit(1)
