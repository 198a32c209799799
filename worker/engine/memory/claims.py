"""Shares the memory of a machine among engine processes: what each has planned to take counts as taken at once.

The memory that is free says nothing of what another engine, which is still loading, is about to take, or of a cache
that fills only later. So each engine process writes what it has planned into a file of its own in the runtime directory
of its user, and holds a lock on it as long as it lives. A file that nobody locks is of a process that has ended; it is
removed. Plans are made one at a time, under another lock."""

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

from tokenbus.worker.engine.memory.room import UNLIMITED, OtherClaim, Room, room_of
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import HOST, DeviceMemory, HostLimit

HOST_CACHE = "host cache"
"""The name among devices of what copies of blocks may take of the host's memory."""
COPIES_NAME = "tokenbus-host-cache"
"""The name of files in memory for copies of blocks (worker/replica/host_memory.py)."""
_BLOCK_BYTES = 512
_LOCK = "lock"
_LOCK_TIMEOUT_S = 10.0
_LOCK_INTERVAL_S = 0.01
_SUFFIX = ".claim"
_MAX_BYTES = 65_536


class _Record(msgspec.Struct, frozen=True):
    """The content of a file."""

    pid: int
    claims: dict[str, dict[str, int]]
    """Bytes by device, of each part of the process that has claimed some."""
    taken: list[str] = []
    """The parts that have taken their memory on devices other than the host."""


class MemoryClaims:
    """The claims of this process, beside those of others. Without a directory there are no others."""

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
        """Keeps other processes from planning meanwhile. One that stands still while it plans is not waited for."""
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
        """Returns the memory of the host that a part of this process may claim: that of the tightest limit, under each
        of which only those processes count that are in its control group."""
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

    def claim(self, part: str, sizes: dict[str, int]) -> None:
        """Notes what a part of this process is going to take of each device, in place of what it has claimed before.
        To be called while `planning`."""
        with self._lock:
            taken = [name for name in self._record.taken if name != part]
            self._write(_Record(self._record.pid, self._record.claims | {part: sizes}, taken))

    def took(self, part: str) -> None:
        """Notes that a part has its memory: what is free on a GPU shows that from now on."""
        with self._lock:
            if part in self._record.claims and part not in self._record.taken:
                self._write(msgspec.structs.replace(self._record, taken=[*self._record.taken, part]))

    def release(self, part: str) -> None:
        """Notes that a part takes nothing any more."""
        with self._lock:
            if part in self._record.claims:
                claims = {name: sizes for name, sizes in self._record.claims.items() if name != part}
                self._write(_Record(self._record.pid, claims, [one for one in self._record.taken if one in claims]))

    def _others_on_host(self, part: str) -> Iterator[tuple[list[str], OtherClaim]]:
        """Yields what each other living process has claimed of the host's memory, and the control groups that it is in.

        A part with the path of a file as its name is the weights in it, which are there once for all."""
        shared = {name for name in (*self._record.claims, part) if name.startswith("/")}
        for record in self._records():
            parts = [sizes for name, sizes in record.claims.items() if name not in shared]
            claimed = sum(sizes.get(HOST, 0) for sizes in parts)
            cached = sum(sizes.get(HOST_CACHE, 0) for sizes in parts)
            taken, copies = min(claimed, resident_bytes(record.pid)), min(cached, copies_bytes(record.pid))
            groups = device_memory.groups_of(str(record.pid))
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
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until this process ends; nobody else looks for files meanwhile
        # in one piece: whoever reads it meanwhile finds what was there before, or all of this
        os.pwrite(self._file, msgspec.json.encode(record).ljust(os.fstat(self._file).st_size), 0)


def _lock(fd: int, deadline: float) -> bool:
    """Locks a file; returns whether nobody else has it locked until the deadline."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return True


def _is_in(group: str, groups: Iterable[str]) -> bool:
    """Whether a process with these control groups is in one of them, or below it; all are on the machine."""
    below = group.rstrip("/") + "/"
    return not group or any(f"/{one}/".startswith(below) for one in groups)


def _read(path: Path) -> _Record | None:
    """Returns a living process's record; removes that of one that has ended."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=_Record)
        path.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(fd)
    return None


def resident_bytes(pid: int) -> int:
    """Returns the memory of a process that is no part of a file on a disk, so that it does not count as free."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def copies_bytes(pid: int) -> int:
    """Returns the memory of a process's files in memory for copies of blocks."""
    found = 0
    with contextlib.suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if str(descriptor.readlink()).startswith(f"/memfd:{COPIES_NAME}"):
                    found += descriptor.stat().st_blocks * _BLOCK_BYTES
    return found


def runtime_directory() -> Path | None:
    """Returns this user's directory for claims, and makes it; None if there can be none that is only theirs."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(given, "tokenbus") if given else Path(tempfile.gettempdir(), f"tokenbus-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{path} belongs to somebody else, or others may write there")
    except OSError as error:
        structlog.get_logger().warning("memory_not_shared", error=str(error))
        return None
    return path
