"""Shares a machine's memory among engine processes: what each plans to take counts as taken at once. Its cores are not
shared, but counted.

Free memory says nothing about what another engine that is still loading will take, or about a cache that fills later.
So each engine process writes its plan into its own file in its user's runtime directory, and holds a lock on it as long
as it lives. An unlocked file belongs to a process that has ended, and is removed. Plans are made one at a time, under
another lock."""

import contextlib
import fcntl
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import structlog

from tokenbus.protocol.process import control_groups
from tokenbus.worker.engine.memory.fit import UNLIMITED, OtherClaim, Room, room_of
from tokenbus.worker.files.device_memory import HOST, DeviceMemory, HostLimit

HOST_CACHE = "host cache"
"""The device name under which host memory for copies of blocks is claimed."""
COPIES_NAME = "tokenbus-host-cache"
"""The name of in-memory files for copies of blocks."""
_BLOCK_BYTES = 512
_LOCK = "lock"
_LOCK_TIMEOUT_S = 10.0
_LOCK_INTERVAL_S = 0.01
_SUFFIX = ".claim"
_MAX_BYTES = 1 << 20


def open_memory() -> int:
    """Returns a file in host memory for copies of blocks, which takes up only what is written."""
    return os.memfd_create(COPIES_NAME, os.MFD_CLOEXEC)


class _Record(msgspec.Struct, frozen=True):
    """The content of a file."""

    pid: int
    claims: dict[str, dict[str, int]]
    """Bytes by device, for each part of the process that has claimed some."""
    taken: list[str] = []
    """The parts that have already taken their memory on devices other than the host."""
    greedy_threads: dict[str, int] = {}
    """The number of threads with which each part computes that wants all cores of this process; 0 for others."""


class MemoryClaims:
    """The claims of this process, alongside those of others. Without a directory there are no others."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._file: int | None = None
        self._record = _Record(os.getpid(), {})

    def __repr__(self) -> str:
        return f"<MemoryClaims {self._record.claims} in {self._folder}>"

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Keeps other processes from planning meanwhile. Does not wait for a process that freezes while planning."""
        if self._folder is None:
            yield
            return
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _lock(fd, time.monotonic() + _LOCK_TIMEOUT_S):
                structlog.get_logger().warning("memory_not_shared", error="another process has not ended its plan")
            yield
        finally:
            os.close(fd)

    def host_room(self, limits: Iterable[HostLimit], part: str, share: float) -> Room:
        """Returns the host memory that a part of this process may claim, by the tightest limit. Under each limit only
        the processes in its control group count."""
        elsewhere = self._elsewhere((HOST, HOST_CACHE), part)
        taken = resident_bytes(self._record.pid) + copies_bytes(self._record.pid)
        others = list(self._others_on_host(part))
        rooms = [
            room_of(
                DeviceMemory(HOST, limit.total_bytes, limit.free_bytes),
                taken,
                elsewhere,
                [claim for groups, claim in others if _is_in(limit.group, groups)],
                share,
            )
            for limit in limits
        ]
        return Room(*(min(sizes) for sizes in zip(*rooms, strict=True))) if rooms else UNLIMITED

    def room(self, device: DeviceMemory, part: str, share: float) -> Room:
        """Returns the memory of a GPU that a part of this process may claim."""
        name, record = device.device, self._record
        taken = sum(record.claims[one].get(name, 0) for one in record.taken if one in record.claims)
        return room_of(device, taken, self._elsewhere((name,), part), self._others_on_gpu(name), share)

    def _elsewhere(self, devices: Iterable[str], part: str) -> int:
        """Returns what the other parts of this process have claimed."""
        others = (sizes for name, sizes in self._record.claims.items() if name != part)
        return sum(sizes.get(device, 0) for sizes in others for device in devices)

    def claim(self, part: str, sizes: dict[str, int], greedy_threads: int = 0) -> None:
        """Notes what a part of this process will take of each device, and with how many threads it computes if it wants
        all cores, replacing its earlier claim. Call it while `planning`."""
        with self._lock:
            record = self._record
            self._write(
                _Record(
                    record.pid,
                    record.claims | {part: sizes},
                    [name for name in record.taken if name != part],
                    record.greedy_threads | {part: greedy_threads},
                )
            )

    def greedy_threads(self) -> tuple[int, int]:
        """Returns how many threads this process and others compute with that want all their cores, and how many cores
        these are; nothing if this one leaves some. Call it while `planning`."""
        if not any(self._record.greedy_threads.values()):
            return 0, 0
        greedy = [one for one in (self._record, *self._records()) if any(one.greedy_threads.values())]
        cores = {core for one in greedy for core in _affinity(one.pid)}
        return sum(sum(one.greedy_threads.values()) for one in greedy), len(cores)

    def took(self, part: str) -> None:
        """Notes that a part has its memory, so that a GPU's free memory now reflects it."""
        with self._lock:
            if part in self._record.claims and part not in self._record.taken:
                self._write(msgspec.structs.replace(self._record, taken=[*self._record.taken, part]))

    def release(self, part: str) -> None:
        """Notes that a part no longer takes anything."""
        with self._lock:
            if part in self._record.claims:
                claims = {name: sizes for name, sizes in self._record.claims.items() if name != part}
                taken = [one for one in self._record.taken if one in claims]
                threads = {name: count for name, count in self._record.greedy_threads.items() if name in claims}
                self._write(_Record(self._record.pid, claims, taken, threads))

    def _others_on_host(self, part: str) -> Iterator[tuple[list[str], OtherClaim]]:
        """Yields what each other living process has claimed of the host's memory, and the control groups that it is in.

        A part named by a file's path stands for the weights in it, which all processes share."""
        shared = {name for name in (*self._record.claims, part) if name.startswith("/")}
        for record in self._records():
            parts = [sizes for name, sizes in record.claims.items() if name not in shared]
            claimed = sum(sizes.get(HOST, 0) for sizes in parts)
            cached = sum(sizes.get(HOST_CACHE, 0) for sizes in parts)
            taken, copies = min(claimed, resident_bytes(record.pid)), min(cached, copies_bytes(record.pid))
            groups = control_groups.paths_of(str(record.pid), "memory")
            yield groups, OtherClaim(claimed + copies, taken + copies, cached - copies)

    def _others_on_gpu(self, device: str) -> Iterator[OtherClaim]:
        """Yields what each other living process has claimed of a GPU."""
        for record in self._records():
            claimed = sum(sizes.get(device, 0) for sizes in record.claims.values())
            yield OtherClaim(
                claimed, sum(record.claims[one].get(device, 0) for one in record.taken if one in record.claims)
            )

    def _records(self) -> Iterator[_Record]:
        """Yields the record of each other living process."""
        if self._folder is not None:
            for path in self._folder.glob(f"*{_SUFFIX}"):
                if path != self._path and (record := _read(path)) is not None:
                    yield record

    def _write(self, record: _Record) -> None:
        self._record = record
        if self._folder is None:
            return
        if self._file is None:
            # ids may be equal in two containers that share the directory
            path = self._folder / f"{self._record.pid}-{secrets.token_hex(4)}{_SUFFIX}"
            self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until this process ends; none looks for files meanwhile
        # in one piece: a concurrent reader finds the old content, or all of the new
        os.pwrite(self._file, msgspec.json.encode(record).ljust(os.fstat(self._file).st_size), 0)


def _lock(fd: int, deadline: float) -> bool:
    """Locks a file; returns whether that succeeded before the deadline."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return True


def _affinity(pid: int) -> set[int]:
    """Returns the cores on which a process may run; none if it has ended."""
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


def _is_in(group: str, groups: Iterable[str]) -> bool:
    """Whether a process in these control groups is in `group` or below it; all are in the machine's."""
    below = group.rstrip("/") + "/"
    return not group or any(f"/{one}/".startswith(below) for one in groups)


def _read(path: Path) -> _Record | None:
    """Returns a living process's record; removes that of one that has ended. What can't be read is logged: such a
    process's memory seems free."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # another process has removed it
        return None
    except OSError as error:
        _warn(path, error)
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=_Record)
        path.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError) as error:
        _warn(path, error)
    finally:
        os.close(fd)
    return None


def _warn(path: Path, error: Exception) -> None:
    structlog.get_logger().warning("memory_not_shared", error=f"{path} can't be read: {error}")


def resident_bytes(pid: int) -> int:
    """Returns a process's memory that is not backed by a file on disk, and so does not count as free."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def copies_bytes(pid: int) -> int:
    """Returns the size of a process's in-memory files for copies of blocks."""
    found = 0
    with contextlib.suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if str(descriptor.readlink()).startswith(f"/memfd:{COPIES_NAME}"):
                    found += descriptor.stat().st_blocks * _BLOCK_BYTES
    return found


def runtime_directory() -> Path | None:
    """Returns this user's directory for claims, creating it; None if no private directory is possible."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(given, "tokenbus") if given else Path(tempfile.gettempdir(), f"tokenbus-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{path} belongs to another user, or others may write there")
    except OSError as error:
        structlog.get_logger().warning("memory_not_shared", error=str(error))
        return None
    return path
