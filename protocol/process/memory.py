"""Gives memory that is not used any more back to the system."""

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Has the C library return what it keeps of freed memory, where it can: a few ms, without Python's lock.

    To be called after something that has taken much: the library keeps what threads have freed, for each of them."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda pad: None
    return trim
