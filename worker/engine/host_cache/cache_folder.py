"""The folder in which copies outlive the worker, with one file for each engine that uses it at a time.

    <digest of the region's header>-<number>.kv

An engine takes an unlocked file of its own kind, most recently used first, or creates one if there is none. It holds
the lock until it ends. The files encode what users have written, so no other user may read them, and an engine must not
trust what another user has written. So a file that belongs to someone else, or that others may read or write, is
skipped, as are links.

All files together are bounded: before a new one is created, unused ones are removed, longest unused first. Any problem
with the folder or a file is logged, and the engine keeps its copies in memory instead.
"""

import errno
import fcntl
import hashlib
import os
import stat
import time
from typing import NamedTuple

import structlog

_SUFFIX = ".kv"
_MAX_FILES = 64
"""The most engines of one kind that use the folder at the same time."""
_LOCK_TIMEOUT_S = 2.0
"""Time for the engine of a killed worker to end; until then its file is locked."""
_LOCK_INTERVAL_S = 0.05


class _Entry(NamedTuple):
    name: str
    num_bytes: int
    used_at: float


class _RefusedError(Exception):
    """A file or folder can't be trusted. The message says why."""


class CacheFolder:
    """The files in a folder, which may take `max_bytes` in total."""

    def __init__(self, path: str, max_bytes: int, *, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        self._fd = -1
        self._refused: set[str] = set()
        """Files whose refusal has been logged."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<CacheFolder {self._path}>"

    def take(self, header: bytes, num_bytes: int) -> int | None:
        """Returns a locked file for copies with this header, with room for `num_bytes`; logs and returns None if there
        can be none."""
        kind = hashlib.blake2b(header, digest_size=8).hexdigest()
        try:
            self._fd = self._open_folder()
            try:
                return self._take(kind, num_bytes)
            finally:
                os.close(self._fd)
        except (_RefusedError, OSError) as error:
            self._log.warning("cache_not_kept", path=self._path, reason=str(error))
            return None

    def _open_folder(self) -> int:
        """Raises _RefusedError if others could create files there."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return fd
        os.close(fd)
        if found.st_uid != os.geteuid():
            raise _RefusedError(f"belongs to user {found.st_uid}, and this process is user {os.geteuid()}")
        raise _RefusedError(f"has mode {stat.S_IMODE(found.st_mode):04o}: others may write there; chmod 700")

    def _take(self, kind: str, num_bytes: int) -> int:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            own = [one.name for one in self._entries() if one.name.startswith(f"{kind}-")]
            for name in own:
                if (fd := self._lock(name)) is not None:
                    os.utime(fd)
                    return fd
            is_locked = any(name not in self._refused for name in own)
            if not is_locked or time.monotonic() >= deadline:
                break
            time.sleep(_LOCK_INTERVAL_S)
        return self._make(kind, num_bytes)

    def _make(self, kind: str, num_bytes: int) -> int:
        if not self._has_room(num_bytes):
            most = self._max_bytes >> 20
            raise _RefusedError(
                f"there is no room for {num_bytes >> 20} MiB beside files in use: {most} MiB are allowed"
            )
        for number in range(_MAX_FILES):
            name = f"{kind}-{number}{_SUFFIX}"
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(name, flags, 0o600, dir_fd=self._fd)
            except FileExistsError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another engine has already found it
                os.close(fd)
                continue
            return fd
        raise _RefusedError(f"{_MAX_FILES} engines of this kind use it already")

    def _lock(self, name: str) -> int | None:
        """Opens and locks a file; returns None if another process has locked it or it can't be trusted."""
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            if error.errno != errno.ENOENT:  # otherwise it has just been removed
                self._refuse(name, "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror))
            return None
        try:
            _check(os.fstat(fd))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check(os.fstat(fd))  # it may have been removed before the lock
        except BlockingIOError:
            os.close(fd)
            return None
        except (_RefusedError, OSError) as error:
            os.close(fd)
            self._refuse(name, str(error))
            return None
        return fd

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._log.warning("cache_file_refused", path=f"{self._path}/{name}", reason=reason)

    def _has_room(self, num_bytes: int) -> bool:
        """Removes unused files, longest unused first, until there is room for that many bytes; returns whether there
        is."""
        entries = self._entries()
        total = sum(one.num_bytes for one in entries) + num_bytes
        for one in reversed(entries):
            if total <= self._max_bytes:
                break
            if (fd := self._lock(one.name)) is not None:
                os.unlink(one.name, dir_fd=self._fd)
                os.close(fd)
                total -= one.num_bytes
                self._log.info("cache_file_removed", path=f"{self._path}/{one.name}", bytes=one.num_bytes)
        return total <= self._max_bytes

    def _entries(self) -> list[_Entry]:
        """Returns the cache files, most recently used first."""
        found = []
        for name in os.listdir(self._fd):
            if name.endswith(_SUFFIX):
                try:
                    about = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(_Entry(name, about.st_size, about.st_mtime))
        return sorted(found, key=lambda one: one.used_at, reverse=True)


def _check(found: os.stat_result) -> None:
    """Raises _RefusedError for a file that others could have written or can read."""
    if not stat.S_ISREG(found.st_mode):
        raise _RefusedError("is not a regular file")
    if found.st_uid != os.geteuid():
        raise _RefusedError(f"belongs to user {found.st_uid}, and this process is user {os.geteuid()}")
    if found.st_nlink != 1:
        raise _RefusedError(f"has {found.st_nlink} names; it may have one")
    if found.st_mode & 0o077:
        raise _RefusedError(f"has mode {stat.S_IMODE(found.st_mode):04o}; others must have no access: chmod 600")
