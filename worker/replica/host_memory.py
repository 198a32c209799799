"""The in-memory file that holds copies of blocks while engines come and go.

The frontend owns it and hands it to each engine process in turn."""

import os

from tokenbus.worker.engine.memory.claims import COPIES_NAME


def open_memory() -> int:
    """Returns a file in host memory, which takes up only what is written."""
    return os.memfd_create(COPIES_NAME, os.MFD_CLOEXEC)
