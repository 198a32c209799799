"""Says which processes others go before."""

import contextlib
import os
from pathlib import Path

_NICENESS = 10
"""Beside a process that is always busy, about a tenth of a processor."""


def go_last() -> None:
    """Lets other processes use the processors before this one, and before the processes and threads that it starts."""
    os.nice(_NICENESS)
    if os.getsid(0) == os.getpid():  # Linux shares the processors among sessions first; another's is not ours to change
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICENESS))
