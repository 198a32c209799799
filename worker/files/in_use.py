"""Marks weights as in use, so that they are not removed: a shared lock on the file, which ends with its process."""

import contextlib
import fcntl
from pathlib import Path
from typing import BinaryIO


def hold(weights: Path) -> BinaryIO:
    """Returns an open file; the weights are in use until it is closed. Raises OSError if they can't be read."""
    file = weights.open("rb")
    with contextlib.suppress(OSError):  # a file system without locks: use can't be detected
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def is_held(weights: Path) -> bool:
    """Whether a worker is using the weights; False if that can't be detected."""
    with weights.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
