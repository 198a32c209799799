"""The audit log: a stream of the broker's JetStream to which records are only added.

A record waits in memory until the broker has stored it; no request waits for that. What finds the queue full is lost,
and counted."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, NamedTuple

from nats.js import api

from tokenbus.protocol import late_logger, tasks
from tokenbus.protocol.access import audit
from tokenbus.protocol.access.audit import AuditKind, AuditRecord
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError, StreamContents, bucket_name
from tokenbus.protocol.bus.connection import Connection

if TYPE_CHECKING:
    from tokenbus.protocol.telemetry.metrics import Counter

_NAME = "audit"
STORED, LOST = "stored", "lost"
"""The outcomes of records, in metrics."""
MAX_QUEUED = 16_384
"""Records that wait for the broker: up to about 10 MB."""
_AT_ONCE = 64
_PAUSE_S = 1.0
"""Time between attempts while the broker does not store records."""
_CLOSE_S = 3.0
_DAY_S = 86_400.0
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """Whether a process writes to the audit log, and what the log keeps."""

    audit: bool = False
    """Record who did what, without texts, in a stream of the broker's JetStream."""
    audit_days: int = 365
    """Days for which the log keeps records, if this process makes it."""
    audit_mib: int = 1_024
    """Size of the log in MiB, if this process makes it; beyond that the oldest records go first."""


class StoredRecord(NamedTuple):
    number: int
    """Its place in the log."""
    record: AuditRecord | None
    """None if it can't be read."""


class AuditLog(StreamContents):
    """The stream."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        """`prefix` is that of all subjects."""
        super().__init__(connection, bucket_name(prefix, _NAME), f"{prefix}.{_NAME}.")

    async def create(self, settings: AuditSettings) -> bool:
        """Makes the stream, unless it is there; nobody can take single records out of it. Returns whether it keeps what
        the settings say. Raises BucketError."""
        max_age_s, max_bytes = settings.audit_days * _DAY_S, settings.audit_mib * _MIB
        found = await self._create(api.StreamConfig(max_age=max_age_s, max_bytes=max_bytes, deny_purge=True))
        return (found.max_age, found.max_bytes) == (max_age_s, max_bytes)

    async def add(self, record: AuditRecord, record_id: str) -> None:
        """Stores a record, once within two minutes for each id. Raises BucketError."""
        await self._put(audit.key_of(record), audit.encode(record), {api.Header.MSG_ID.value: record_id})

    async def page(self, first: int | str, keys: str) -> tuple[list[StoredRecord], bool]:
        """Returns the next records, and whether they are the last ones. `first` is the least number, or a time as RFC
        3339; `keys` a pattern as of `audit.pattern_of`. Raises BucketError."""
        found, is_complete = await self._page({"seq" if isinstance(first, int) else "start_time": first}, keys)
        return [StoredRecord(one.revision, _readable(one.value)) for one in found], is_complete


def _readable(payload: bytes | None) -> AuditRecord | None:
    try:
        return audit.decode(payload or b"")
    except ValueError:
        return None


class AuditWriter:
    """Writes one process's records, in the order in which they came, as far as the broker is there."""

    def __init__(self, log: AuditLog, settings: AuditSettings, max_queued: int = MAX_QUEUED) -> None:
        self.on_stored: Callable[[int], None] = lambda count: None
        """Called with the number of records that were stored."""
        self.on_lost: Callable[[int], None] = lambda count: None
        """Called with the number of records that were lost."""
        self._audit = log
        self._settings = settings
        self._max_queued = max_queued
        self._queue: deque[tuple[AuditRecord, str]] = deque()
        self._ids = secrets.token_hex(6)
        self._num_added = 0
        self.num_lost = 0
        """Records that were lost."""
        self._num_lost = 0
        """Since the broker last stored one."""
        self._is_failing = False
        self._is_made = False
        self._added = asyncio.Event()
        self._log = late_logger.get_logger()

    def __repr__(self) -> str:
        return f"<AuditWriter {len(self)} queued>"

    def __len__(self) -> int:
        return len(self._queue)

    def add(
        self, kind: AuditKind, what: str, tenant: str = "", actor: str = "", *, once: str = "", **fields: object
    ) -> None:
        """Records an act. Neither raises nor waits. Of those that all processes add within two minutes with the same
        text `once`, one is stored."""
        if len(self._queue) >= self._max_queued:
            self._lose_one()
            return
        self._num_added += 1
        one = audit.record(time.time(), kind, what, tenant, actor, **fields)
        self._queue.append((one, once or f"{self._ids}-{self._num_added}"))
        self._added.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            if not self._queue and self._is_made:
                self._added.clear()
                await self._added.wait()
            if not await self.write():
                await asyncio.sleep(_PAUSE_S)

    async def write(self) -> bool:
        """Writes the next records; returns whether the broker has stored them. Otherwise they stay, and those that were
        stored all the same are not stored twice."""
        batch = [self._queue[index] for index in range(min(_AT_ONCE, len(self._queue)))]
        try:
            if not self._audit.is_reachable:
                raise BucketError("the broker can't be reached")
            if not self._is_made:
                await self._make()
            results = await asyncio.gather(*(self._audit.add(*one) for one in batch), return_exceptions=True)
            left = [one for one, error in zip(batch, results, strict=True) if error is not None]
            for _ in batch:
                self._queue.popleft()
            self._queue.extendleft(reversed(left))
            self.on_stored(len(batch) - len(left))
            for error in filter(None, results):
                raise error
        except BucketError as error:
            if isinstance(error, BucketMissingError):
                self._is_made = False
            if not self._is_failing:
                self._log.error("audit_not_written", error=str(error), count=len(self._queue))
            self._is_failing = True
            return False
        if self._is_failing:
            self._log.warning("audit_written", count=self._num_lost)
        self._is_failing, self._num_lost = False, 0
        return True

    async def close(self) -> None:
        """Writes what is left, if that can be done soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._queue and await self.write():
                    pass
        if num_left := len(self._queue):
            self._queue.clear()
            self.on_lost(num_left)
            self._log.error("audit_lost", count=num_left)

    async def _make(self) -> None:
        """Raises BucketError."""
        is_as_set = await self._audit.create(self._settings)
        self._is_made = True
        if not is_as_set:
            self._log.warning("audit_kept_otherwise")

    def _lose_one(self) -> None:
        self._num_lost += 1
        self.num_lost += 1
        self.on_lost(1)
        if self._num_lost == 1 and not self._is_failing:  # once until records are stored again
            self._log.error("audit_lost", count=1)


def count_records(writer: AuditWriter, counter: "Counter") -> None:
    """Counts what a writer has stored and lost, by outcome."""
    writer.on_stored, writer.on_lost = counter.labels(STORED).inc, counter.labels(LOST).inc


@contextlib.asynccontextmanager
async def writing(connection: Connection, prefix: str, settings: AuditSettings) -> AsyncIterator[AuditWriter]:
    """Writes to the log while the block runs."""
    writer = AuditWriter(AuditLog(connection, prefix), settings)
    running = tasks.background("audit", writer.run())
    try:
        yield writer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await writer.close()
