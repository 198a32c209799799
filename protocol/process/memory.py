"""Returns freed memory to the operating system."""

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Makes glibc return the memory that it retains after `free`; does nothing with another C library.

    Worth calling after memory-hungry work on threads, since glibc retains freed memory per thread. Takes a few
    milliseconds, without the GIL."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda pad: None
    return trim
