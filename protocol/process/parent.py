"""Binds a process to its parent: when the parent ends, however it does, the kernel sends the process a signal.

The binding is to the thread that forks, so only the main thread may start such processes. Linux only."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Asks the calling process to end with its parent. To be called in a child between fork and exec."""
    _bind(signal.SIGTERM)


def die_with_parent() -> None:
    """Ends the calling process, which runs already, at the moment its parent ends, even if it stands still then."""
    _bind(signal.SIGKILL)


def end_with(parent: int) -> None:
    """Like `end_with_parent`, for a process that runs already; exits at once if `parent` is gone."""
    _bind(signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the binding took effect
        os._exit(1)


def _bind(number: signal.Signals) -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
