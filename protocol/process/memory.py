"""Reads how much memory processes take, and returns what is freed to the operating system."""

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import sys
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process, this one by default; 0 if there is none, or the system doesn't say."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def limit_own(more_bytes: int) -> None:
    """Lets this process's allocations fail once it has that much more memory of its own than now. Mapped files don't
    count, so weights that are mapped may have any size. Linux only."""
    sizes = Path("/proc/self/status").read_text().split() if sys.platform == "linux" else []
    if "VmData:" in sizes:
        now = int(sizes[sizes.index("VmData:") + 1]) << 10
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = now + more_bytes if hard == resource.RLIM_INFINITY else min(now + more_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def end_first() -> None:
    """Asks the system to end this process before any other if memory runs out. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def trim_heap() -> None:
    """Makes glibc return the memory that it retains after `free`; does nothing with another C library.

    Worth calling after memory-hungry work on threads, since glibc retains freed memory per thread. Takes a few
    milliseconds, without the GIL."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        _libc().malloc_trim(0)


def release_pages(address: int, num_bytes: int) -> None:
    """Returns whole pages of a range to the operating system; they are zero when they are read again.

    Does nothing on systems other than Linux, whose pages may stay as they are."""
    _advise(address, num_bytes, "MADV_DONTNEED")


def use_small_pages(address: int, num_bytes: int) -> None:
    """Keeps the system from giving a range huge pages, of which each takes 2 MiB once a byte of it is written."""
    _advise(address, num_bytes, "MADV_NOHUGEPAGE")


def _advise(address: int, num_bytes: int, advice: str) -> None:
    """Says how the whole pages of a range are used, on Linux."""
    first = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    end = (address + num_bytes) // _PAGE_BYTES * _PAGE_BYTES
    if sys.platform == "linux" and first < end:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), getattr(mmap, advice))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
