"""The file in memory in which copies of blocks lie while engines come and go.

The frontend owns it and hands it to each engine process in turn."""

import os

from tokenbus.worker.engine.memory.claims import COPIES_NAME


def open_memory() -> int:
    """Returns a file in the host's memory, which takes only what is written."""
    return os.memfd_create(COPIES_NAME, os.MFD_CLOEXEC)
