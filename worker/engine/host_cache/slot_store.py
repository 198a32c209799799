"""Keeps the copies of an engine's blocks, or of its checkpoints, in the slots of a region, which outlives the engine.

The region is a file: either an unnamed one in the host's memory, or one on a disk. It is read and written by system
calls and never mapped: a disk error or a truncated file is an exception here, but would kill a process that maps it.
Reads return a private copy, which can't change after it has been checked (decision 0020).
"""

import errno
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.contract.contract import CheckpointSizes, RecoveredCopies
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.host_cache import slots
from tokenbus.worker.engine.host_cache.slots import SlotError, SlotHeader, SlotLayout
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel
from tokenbus.worker.files import device_memory

FindProblem = Callable[[memoryview, int, int], str]
"""Says in a word why data can't be that of the given tokens; empty if it can. Called with the data, the first token's
position and the number of tokens."""

FindStateProblem = Callable[[memoryview], str]
"""Says in a word why data can't be a lane's state; empty if it can."""
_MAX_SLOTS = 1 << 20
"""The prefix tree takes about 1 kB of memory per block."""
_DEFAULT_SLOTS = 65_536
_LEAST_TOKENS = 16
"""A checkpoint with fewer tokens is of little use."""
_SLOT_TOKENS = 64
"""A slot for checkpoints has room for the keys and values of this many tokens, within the limits `_MIN_SLOT_BYTES` and
`_MAX_SLOT_BYTES`."""
_MIN_SLOT_BYTES = 4_096
_MAX_SLOT_BYTES = 1 << 20
_MIN_SLOT_TOKENS = 256
_BYTES_PER_TOKEN_ID = 64
"""A slot has room for one token id per this many bytes of data: the ids take a sixteenth of it."""
_DEFAULT_BYTES = 1 << 30
_DEFAULT_SHARE = 8
"""Without a setting, at most one in this many bytes of the machine's memory is used for copies."""


class RegionError(RuntimeError):
    """A region can't be used. The message says why."""


class _Copy(NamedTuple):
    slots: tuple[int, ...]
    num_bytes: int
    checksums: tuple[int, ...]
    """The checksum of each slot's data."""
    number: int = 0
    """Its place in the order in which copies were sealed; 0 if not sealed."""


class SlotStore:
    """The copies of one engine, by id. Open it before use. Not thread-safe."""

    def __init__(
        self,
        identity: str,
        layout: SlotLayout,
        find_problem: FindProblem,
        find_state_problem: FindStateProblem = lambda data: "framing",
    ) -> None:
        self.identity = identity
        self.layout = layout
        self.recovered: list[tuple[int, BlockLabel]] = []
        """The copies found when the store was opened, by id, oldest first."""
        self.find_problem = find_problem
        self._find_state_problem = find_state_problem
        self._fd = -1
        self._copies: dict[int, _Copy] = {}
        self._free: list[int] = []
        self._dirty: set[int] = set()
        """Slots that may contain anything but zeros."""
        self.last_number = 0
        """The number of the last sealed copy."""
        self._discarded: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SlotStore, {len(self._copies)} copies, {len(self._free)} of {self.layout.num_slots} slots free>"

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def header(self) -> bytes:
        """The beginning of its region, which identifies the model and format of the copies."""
        return self.layout.region_header(self.identity)

    @property
    def recovery(self) -> RecoveredCopies:
        """The copies found when the store was opened, and the slots that were discarded."""
        found = [self._copies[copy_id] for copy_id, _ in self.recovered if copy_id in self._copies]
        return RecoveredCopies(len(found), sum(copy.num_bytes for copy in found), dict(self._discarded))

    def open(self, fd: int | None = None) -> None:
        """Uses the given region, or creates one that no child inherits. Only one store may use a region at a time.

        Raises RegionError if there is no room for it, or it can't be read; then the caller keeps it."""
        region = os.memfd_create("tokenbus-kv-slots", os.MFD_CLOEXEC) if fd is None else fd
        header = self.header
        try:
            found = os.pread(region, len(header), 0)
            is_known = found == header
            if any(found) and not is_known:
                # Another model or version, or none: none of it is usable, and no other process may read it.
                structlog.get_logger().warning("host_cache_started_anew", reason="its identity or version differs")
            self._allocate(region, keep=is_known)
            self._fd = region
            if is_known:
                self._recover()
            else:
                os.pwrite(region, header, 0)
        except OSError as error:
            self._fd = -1
            if fd is None:
                os.close(region)
            raise RegionError(self._allocation_problem(error)) from error
        used = {slot for copy in self._copies.values() for slot in copy.slots}
        self._free = [slot for slot in reversed(range(self.layout.num_slots)) if slot not in used]

    def write(self, copy_id: int, data: bytes | memoryview) -> None:
        """Puts a copy into free slots. Only this store can find it until it is sealed. Raises DeviceError."""
        assert copy_id not in self._copies, copy_id
        view, size = memoryview(data), self.layout.block_bytes
        pieces = [view[at : at + size] for at in range(0, len(view), size)]
        assert len(pieces) <= len(self._free), (len(data), self)
        taken = tuple(self._take_slot() for _ in pieces)
        self._copies[copy_id] = _Copy(taken, len(view), tuple(map(slots.checksum, pieces)))
        for slot, piece in zip(taken, pieces, strict=True):
            self._pwrite(piece, self.layout.offset(slot) + self.layout.header_bytes)

    def seal(self, labels: Iterable[tuple[int, BlockLabel]]) -> None:
        """Completes copies: from now on another engine can find them. Raises DeviceError."""
        for copy_id, label in labels:
            self.last_number += 1
            copy = self._with_room_for(label, self._copies[copy_id]._replace(number=self.last_number))
            self._copies[copy_id] = copy
            size, width = self.layout.block_bytes, TOKEN_BYTES * self.layout.block_size
            for part, (slot, checksum) in enumerate(zip(copy.slots, copy.checksums, strict=True)):
                tokens = label.tokens[part * width : (part + 1) * width]
                num_bytes = max(0, min(size, copy.num_bytes - part * size))
                of_part = label._replace(tokens=tokens)
                header = SlotHeader(copy.number, of_part, num_bytes, checksum, part, len(copy.slots))
                self._pwrite(self.layout.pack(header), self.layout.offset(slot))

    def discard_after(self, number: int) -> None:
        """Discards the copies sealed after this one. Raises DeviceError."""
        for copy_id in [copy_id for copy_id, copy in self._copies.items() if copy.number > number]:
            self.discard(copy_id)

    def read(self, copy_id: int) -> bytearray:
        """Returns a copy's data. Raises DeviceError if it is not as it was written."""
        copy = self._copies[copy_id]
        data = self._read_data(copy.slots, copy.num_bytes)
        size = self.layout.block_bytes
        for part, (slot, checksum) in enumerate(zip(copy.slots, copy.checksums, strict=True)):
            if slots.checksum(memoryview(data)[part * size : (part + 1) * size]) != checksum:
                raise DeviceError(f"the host cache has changed what was in slot {slot}")
        return data

    def discard(self, copy_id: int) -> None:
        """Empties a copy's slots. The data stays in the region until another copy is written there, or `zero` is
        called."""
        copy = self._copies.pop(copy_id)
        self._free += copy.slots
        for slot in copy.slots:
            self._pwrite(slots.EMPTY, self.layout.offset(slot))

    def reject(self, reasons: dict[int, str]) -> None:
        """Discards recovered copies that the engine can't use, and counts them by reason."""
        for copy_id, reason in reasons.items():
            self.discard(copy_id)
            self._discarded[reason] += 1

    def zero(self) -> None:
        """Overwrites all slots without a copy. Raises DeviceError."""
        zeros = bytes(self.layout.slot_bytes)
        for slot in self._dirty - {slot for copy in self._copies.values() for slot in copy.slots}:
            self._pwrite(zeros, self.layout.offset(slot))
            self._dirty.discard(slot)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_slot(self) -> int:
        """Takes a free, empty slot."""
        slot = self._free.pop()
        self._dirty.add(slot)
        self._pwrite(slots.EMPTY, self.layout.offset(slot))
        return slot

    def _with_room_for(self, label: BlockLabel, copy: _Copy) -> _Copy:
        """Returns a copy with additional slots without data, if its tokens need more slots than its data."""
        missing = self.layout.parts(copy.num_bytes, len(label.tokens) // TOKEN_BYTES) - len(copy.slots)
        more = tuple(self._take_slot() for _ in range(missing))
        return copy._replace(slots=copy.slots + more, checksums=copy.checksums + (slots.checksum(b""),) * missing)

    def _allocate(self, fd: int, *, keep: bool) -> None:
        """Sets the region's size. On a disk it is fully allocated at once, so that no later write finds the disk
        full."""
        if not keep:
            os.ftruncate(fd, 0)
        if os.fstat(fd).st_nlink > 0:  # a file of memfd_create has no name
            os.posix_fallocate(fd, 0, self.layout.region_bytes)
        os.ftruncate(fd, self.layout.region_bytes)

    def _allocation_problem(self, error: OSError) -> str:
        size = f"{self.layout.region_bytes >> 20} MiB"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"there is no room for {size} ({error.strerror}): pass a smaller --host-cache-mib"
        return f"can't use {size} there: {error}"

    def _recover(self) -> None:
        """Finds the copies of the region's previous engine, and empties slots that can't be trusted."""
        self._dirty = set(range(self.layout.num_slots))
        parts: defaultdict[int, dict[int, tuple[SlotHeader, int]]] = defaultdict(dict)
        for slot in range(self.layout.num_slots):
            try:
                header = self.layout.unpack(os.pread(self._fd, self.layout.header_bytes, self.layout.offset(slot)))
                if header is not None:
                    if header.part in parts[header.number]:
                        raise SlotError("duplicate")
                    parts[header.number][header.part] = header, slot
            except SlotError as error:
                self._throw_away([slot], str(error))
        for number, found in sorted(parts.items()):
            in_order = [found[part] for part in sorted(found)]
            try:
                self._recover_copy(number, in_order)
            except SlotError as error:
                self._throw_away([slot for _, slot in in_order], str(error))
        self.last_number = max(parts, default=0)

    def _recover_copy(self, number: int, parts: list[tuple[SlotHeader, int]]) -> None:
        """Recovers a copy from all its parts. Raises SlotError if one is missing, or their data is unusable."""
        headers = [header for header, _ in parts]
        if {header.parts for header in headers} != {len(headers)}:
            raise SlotError("torn")
        label = headers[0].label._replace(tokens=b"".join(header.label.tokens for header in headers))
        if any(header.label._replace(tokens=label.tokens) != label for header in headers):
            raise SlotError("torn")
        taken, num_bytes = tuple(slot for _, slot in parts), sum(header.num_bytes for header in headers)
        data = memoryview(self._read_data(taken, num_bytes))
        size = self.layout.block_bytes
        for header in headers:
            if slots.checksum(data[header.part * size : (header.part + 1) * size]) != header.data_checksum:
                raise SlotError("torn")
        count = len(label.tokens) // TOKEN_BYTES
        problem = self._find_state_problem(data) if label.is_state else self.find_problem(data, label.start, count)
        if problem:
            raise SlotError(problem)
        copy_id = len(self.recovered) + 1
        self._copies[copy_id] = _Copy(taken, num_bytes, tuple(header.data_checksum for header in headers), number)
        self.recovered.append((copy_id, label))

    def _throw_away(self, taken: list[int], reason: str) -> None:
        self._discarded[reason] += 1
        for slot in taken:
            os.pwrite(self._fd, slots.EMPTY, self.layout.offset(slot))

    def _read_data(self, taken: tuple[int, ...], num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, size = memoryview(data), self.layout.block_bytes
        for part, slot in enumerate(taken):
            left = view[part * size : (part + 1) * size]
            offset = self.layout.offset(slot) + self.layout.header_bytes
            while left:
                count = os.preadv(self._fd, [left], offset)
                if not count:
                    break  # the file was truncated: the missing part stays 0, which the checksum detects
                left, offset = left[count:], offset + count
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


def make_store(
    identity: str, block_size: int, block_bytes: int, settings: EngineSettings, find_problem: FindProblem
) -> SlotStore | None:
    """Returns a store with as many slots as the settings allow, or None if they allow none. Raises ModelError if that
    is too many."""
    layout = SlotLayout(block_size, block_bytes, 0)
    budget = budget_bytes(settings)
    if settings.host_cache_mib < 0:
        budget = min(budget, _DEFAULT_SLOTS * layout.slot_bytes)
    count = budget // layout.slot_bytes
    if count > _MAX_SLOTS:
        raise ModelError(
            f"--host-cache-mib must be at most {_MAX_SLOTS * layout.slot_bytes >> 20:,} for this model, "
            f"got {settings.host_cache_mib}: it would hold {count:,} blocks, and a worker keeps up to {_MAX_SLOTS:,}"
        )
    return SlotStore(identity, layout._replace(num_slots=count), find_problem) if count else None


def make_checkpoint_store(
    identity: str,
    sizes: CheckpointSizes,
    settings: EngineSettings,
    find_problem: FindProblem,
    find_state_problem: FindStateProblem,
) -> SlotStore | None:
    """Returns a store for checkpoints with states, keys and values of these sizes, or None if there is no room for
    any."""
    layout = _checkpoint_layout(sizes.state_bytes, sizes.token_bytes)
    most = _DEFAULT_SLOTS if settings.host_cache_mib < 0 else _MAX_SLOTS
    count = min(most, budget_bytes(settings) // layout.slot_bytes)
    named = f"{identity}:checkpoints {sizes.state_bytes},{sizes.token_bytes},{sizes.copy_bytes}"
    return SlotStore(named, layout._replace(num_slots=count), find_problem, find_state_problem) if count else None


def checkpoint_sizes(sizes: CheckpointSizes, store: SlotStore | None) -> CheckpointSizes | None:
    """Returns the sizes of checkpoints in a store, or None if there is no room for even one."""
    if store is None:
        return None
    layout = store.layout
    stored = sizes._replace(
        budget_bytes=layout.num_slots * layout.slot_bytes,
        slot_bytes=layout.slot_bytes,
        slot_data_bytes=layout.block_bytes,
        slot_tokens=layout.block_size,
    )
    needed = stored.state_copy_bytes(_LEAST_TOKENS) + stored.kv_bytes(_LEAST_TOKENS)
    return stored if needed <= stored.budget_bytes else None


def _checkpoint_layout(state_bytes: int, token_bytes: int) -> SlotLayout:
    """Returns slots small enough to waste little in the last one of a copy, and large enough to be few."""
    least = min(state_bytes, _SLOT_TOKENS * token_bytes or state_bytes)
    data_bytes = min(_MAX_SLOT_BYTES, max(_MIN_SLOT_BYTES, 1 << max(0, least.bit_length() - 1)))
    return SlotLayout(max(_MIN_SLOT_TOKENS, data_bytes // _BYTES_PER_TOKEN_ID), data_bytes, 0)


def budget_bytes(settings: EngineSettings, total_bytes: int | None = None) -> int:
    """Returns the bytes of host memory that the settings allow for copies, on a machine or in a container with
    `total_bytes`; None reads that from the system."""
    if settings.host_cache_mib >= 0:
        return settings.host_cache_mib << 20
    if total_bytes is None:
        host = device_memory.host()
        total_bytes = host.total_bytes if host is not None else _DEFAULT_BYTES
    allowed = min(_DEFAULT_BYTES, total_bytes // _DEFAULT_SHARE)
    return min(allowed, settings.host_cache_limit_bytes or allowed)


def kv_identity(fingerprint: str, layout: str, build: str, block_size: int) -> str:
    """Returns the identity of an engine's keys and values.

    `fingerprint` is that of the model's files; `layout` is their layout in memory, and `build` the name and version of
    the library that writes them. Adapters are part of a block's domain."""
    return ":".join((fingerprint, layout, build, str(block_size)))
