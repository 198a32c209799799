"""Keeps the copies of an engine's blocks in the slots of a region, which outlives the engine.

The region is a file: either an unnamed one in the host's memory, or one on a disk. It is read and written by system
calls and never mapped: a disk error or a truncated file is an exception here, but would kill a process that maps it.
Reads return a private copy, which can't change after it has been checked.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from tokenbus.worker.engine.host_cache import slots
from tokenbus.worker.engine.host_cache.recovery import Recovery
from tokenbus.worker.engine.host_cache.slots import SlotError, SlotHeader, SlotLayout
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel
from tokenbus.worker.engine.runner import DeviceError, ModelError

FindProblem = Callable[[memoryview, int, int], str]
"""Says in a word why data can't be that of the given tokens; empty if it can. Called with the data, the first token's
position and the number of tokens."""


class _Copy(NamedTuple):
    slot: int
    num_bytes: int
    checksum: int
    number: int = 0
    """Its place in the order in which copies were sealed; 0 if not sealed."""


class SlotStore:
    """The copies of one engine, by id. Open it before use. Not thread-safe."""

    def __init__(self, identity: str, layout: SlotLayout, find_problem: FindProblem) -> None:
        self.identity = identity
        self.layout = layout
        self.recovered: list[tuple[int, BlockLabel]] = []
        """The copies found when the store was opened, by id, oldest first."""
        self.find_problem = find_problem
        self._fd = -1
        self._copies: dict[int, _Copy] = {}
        self._free: list[int] = []
        self._dirty: set[int] = set()
        """Slots that may hold anything but zeros."""
        self._last_number = 0
        self._discarded: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SlotStore, {len(self._copies)} of {self.layout.num_slots} slots>"

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def recovery(self) -> Recovery:
        """The copies found when the store was opened, and the slots that were discarded."""
        found = [self._copies[copy_id] for copy_id, _ in self.recovered if copy_id in self._copies]
        return Recovery(len(found), sum(copy.num_bytes for copy in found), dict(self._discarded))

    def open(self, fd: int | None = None) -> None:
        """Uses the given region, or creates one that no child inherits. Only one store may use a region at a time.

        Raises ModelError if the file holds something else, or if there is no room for it."""
        self._fd = os.memfd_create("tokenbus-kv-slots", os.MFD_CLOEXEC) if fd is None else fd
        header = self.layout.region_header(self.identity)
        found = os.pread(self._fd, len(header), 0)
        if not slots.is_region(found):
            raise ModelError(
                "--host-cache-file names a file that is not a cache of Tokenbus: remove it, or name another"
            )
        is_known = found == header
        if any(found) and not is_known:
            # Another model, version or size: none of it is usable, and no other process may read it.
            structlog.get_logger().warning("host_cache_started_anew", reason="its identity, version or size differs")
        try:
            self._allocate(keep=is_known)
            if is_known:
                self._recover()
            else:
                os.pwrite(self._fd, header, 0)
        except OSError as error:
            raise ModelError(self._allocation_problem(error)) from error
        used = {copy.slot for copy in self._copies.values()}
        self._free = [slot for slot in reversed(range(self.layout.num_slots)) if slot not in used]

    def write(self, copy_id: int, data: bytes | memoryview) -> None:
        """Puts a copy into a free slot. Only this store can find it until it is sealed. Raises DeviceError."""
        assert copy_id not in self._copies, copy_id
        assert len(data) <= self.layout.block_bytes, (len(data), self.layout)
        slot = self._free.pop()
        self._dirty.add(slot)
        self._copies[copy_id] = _Copy(slot, len(data), slots.checksum(data))
        offset = self.layout.offset(slot)
        self._pwrite(slots.EMPTY, offset)
        self._pwrite(data, offset + self.layout.header_bytes)

    def seal(self, labels: Iterable[tuple[int, BlockLabel]]) -> None:
        """Completes copies: from now on another engine can find them. Raises DeviceError."""
        for copy_id, label in labels:
            copy = self._copies[copy_id]
            self._last_number += 1
            header = SlotHeader(self._last_number, label, copy.num_bytes, copy.checksum)
            self._pwrite(self.layout.pack(header), self.layout.offset(copy.slot))
            self._copies[copy_id] = copy._replace(number=self._last_number)

    @property
    def last_number(self) -> int:
        """The number of the last sealed copy."""
        return self._last_number

    def discard_after(self, number: int) -> None:
        """Discards the copies sealed after this one. Raises DeviceError."""
        for copy_id in [copy_id for copy_id, copy in self._copies.items() if copy.number > number]:
            self.discard(copy_id)

    def read(self, copy_id: int) -> bytearray:
        """Returns a copy's data. Raises DeviceError if it is not as it was written."""
        copy = self._copies[copy_id]
        data = self._read_data(copy.slot, copy.num_bytes)
        if slots.checksum(memoryview(data)) != copy.checksum:
            raise DeviceError(f"the host cache has changed what was in slot {copy.slot}")
        return data

    def discard(self, copy_id: int) -> None:
        """Empties a copy's slot. The data stays in the region until another copy is written there, or `zero` is
        called."""
        copy = self._copies.pop(copy_id)
        self._free.append(copy.slot)
        self._pwrite(slots.EMPTY, self.layout.offset(copy.slot))

    def reject(self, reasons: dict[int, str]) -> None:
        """Discards recovered copies that the engine can't use, and counts them by reason."""
        for copy_id, reason in reasons.items():
            self.discard(copy_id)
            self._discarded[reason] += 1

    def zero(self) -> None:
        """Overwrites all slots without a copy. Raises DeviceError."""
        zeros = bytes(self.layout.slot_bytes)
        for slot in self._dirty - {copy.slot for copy in self._copies.values()}:
            self._pwrite(zeros, self.layout.offset(slot))
            self._dirty.discard(slot)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _allocate(self, *, keep: bool) -> None:
        """Sets the region's size. On a disk it is fully allocated at once, so that no later write finds the disk
        full."""
        if not keep:
            os.ftruncate(self._fd, 0)
        if self._is_on_disk:
            os.posix_fallocate(self._fd, 0, self.layout.region_bytes)
        os.ftruncate(self._fd, self.layout.region_bytes)

    @property
    def _is_on_disk(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0  # a file of memfd_create has no name

    def _allocation_problem(self, error: OSError) -> str:
        size = f"{self.layout.region_bytes >> 20} MiB"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"--host-cache-file: there is no room for {size} ({error.strerror}): pass a smaller --host-cache-mib"
        return f"--host-cache-file: can't use {size} there: {error}"

    def _recover(self) -> None:
        """Finds the copies of the region's previous engine, and empties slots that can't be trusted."""
        self._dirty = set(range(self.layout.num_slots))
        found: list[tuple[SlotHeader, int]] = []
        for slot in range(self.layout.num_slots):
            offset = self.layout.offset(slot)
            try:
                header = self.layout.unpack(os.pread(self._fd, self.layout.header_bytes, offset))
                if header is not None:
                    self._check_data(slot, header)
                    found.append((header, slot))
            except SlotError as error:
                self._discarded[str(error)] += 1
                os.pwrite(self._fd, slots.EMPTY, offset)
        found.sort(key=lambda one: one[0].number)
        for copy_id, (header, slot) in enumerate(found, start=1):
            self._copies[copy_id] = _Copy(slot, header.num_bytes, header.data_checksum, header.number)
            self.recovered.append((copy_id, header.label))
        self._last_number = found[-1][0].number if found else 0

    def _check_data(self, slot: int, header: SlotHeader) -> None:
        """Raises SlotError if a slot's data does not belong to its header's tokens."""
        data = memoryview(self._read_data(slot, header.num_bytes))
        if slots.checksum(data) != header.data_checksum:
            raise SlotError("torn")
        if problem := self.find_problem(data, header.label.start, header.num_tokens):
            raise SlotError(problem)

    def _read_data(self, slot: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        done = 0
        while done < num_bytes:
            offset = self.layout.offset(slot) + self.layout.header_bytes + done
            count = os.preadv(self._fd, [memoryview(data)[done:]], offset)
            if not count:
                break  # the file was truncated: the missing part stays 0, which the checksum detects
            done += count
        return data

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        """Raises DeviceError: then the slots' contents are unknown, and the next engine finds out."""
        left = memoryview(data)
        try:
            while left:
                count = os.pwrite(self._fd, left, offset)
                left, offset = left[count:], offset + count
        except OSError as error:
            raise DeviceError(f"the host cache could not be written: {error}") from error
