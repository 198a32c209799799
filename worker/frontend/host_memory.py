"""The file in which copies of blocks lie while engines come and go: in the host's memory, or on a disk.

The frontend owns it and hands it to each engine process in turn. One on a disk outlives the frontend too. It holds what
users have written, as numbers, so nobody else may read it, and nobody else may write what an engine will believe.
"""

import asyncio
import errno
import fcntl
import os
import stat

from tokenbus.worker import contract
from tokenbus.worker.engine.memory.claims import COPIES_NAME

_LOCK_TIMEOUT_S = 5.0
"""A worker that was killed may leave an engine that needs a moment to end; until then the file is locked."""
_LOCK_INTERVAL_S = 0.05


def open_memory() -> int:
    """Returns a file in the host's memory, which takes only what is written."""
    return os.memfd_create(COPIES_NAME, os.MFD_CLOEXEC)


async def open_file(path: str) -> int:
    """Opens a cache file, or creates it, and locks it. Raises EngineStartError if it can't be trusted."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise _refusal(path, f"{reason}; name a file in a folder that this user may write") from error
    try:
        _check(path, os.fstat(fd))
        await _lock(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: str, found: os.stat_result) -> None:
    """Raises EngineStartError for a file that others could have written or could read."""
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, "is not a regular file")
    if found.st_uid != os.geteuid():
        raise _refusal(path, f"belongs to user {found.st_uid}, and this process is user {os.geteuid()}")
    if found.st_nlink != 1:
        raise _refusal(path, f"has {found.st_nlink} names; it may have one")
    if found.st_mode & 0o077:
        raise _refusal(path, f"has mode {stat.S_IMODE(found.st_mode):04o}; others must have no access: chmod 600")


async def _lock(path: str, fd: int) -> None:
    """Locks the file for this process and the engines that it hands it to. Raises EngineStartError."""
    try:
        async with asyncio.timeout(_LOCK_TIMEOUT_S):
            while True:
                try:
                    return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_INTERVAL_S)
    except TimeoutError as error:
        raise _refusal(path, "is in use by another worker; each needs a file of its own") from error


def _refusal(path: str, reason: str) -> contract.EngineStartError:
    return contract.EngineStartError(f"--host-cache-file {path}: {reason}")
