"""Binds a process to its parent: when the parent ends, however it does, the kernel sends the process a signal.

The process is bound to the thread that forks it, so only the main thread may start such processes. Linux only."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Asks the calling process to end with its parent. Call it in a child between fork and exec."""
    _bind(signal.SIGTERM)


def die_with_parent() -> None:
    """Ends the calling, already running process the moment its parent ends, even if it is stopped then."""
    _bind(signal.SIGKILL)


def end_with(parent: int) -> None:
    """Does what `end_with_parent` does for an already running process; exits at once if `parent` is gone."""
    _bind(signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the binding took effect
        os._exit(1)


def _bind(number: signal.Signals) -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
