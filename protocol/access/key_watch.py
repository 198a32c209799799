"""Keeps a process's key ring up to date with the store."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.key_stores import FileKeys, KeyStoreError, LoadedKeys, loaded
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bucket import Bucket, BucketError, BucketState
from tokenbus.protocol.bus.connection import Connection

_INTERVAL_S = 1.0
"""Time between two questions whether the store has changed. Puts are heard at once, unless a message is lost."""
_AGAIN_S = (0.02, 0.05, 0.1, 0.2)
"""Pauses after each time that it is asked because a put was heard. That may be a moment before the broker has stored
it, so that it is asked again; it is never asked more often, however many puts are heard."""


class KeyWatch:
    """The base of both watches: asks the store again and again, and logs when it begins and ends to fail."""

    def __init__(self, ring: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self.ring = ring
        self._clock = clock
        self._changed = asyncio.Event()
        self._problems: dict[str, str] = {}
        self._is_failing = False
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ring!r}>"

    async def open(self) -> None:
        """Loads the keys once, if the store can be reached."""
        await self._ask()

    async def watch(self) -> None:
        """Keeps the ring up to date until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._changed.wait()
            was_heard = self._changed.is_set()
            self._changed.clear()
            for pause_s in _AGAIN_S if was_heard else _AGAIN_S[:1]:
                is_changed = await self._ask()
                await asyncio.sleep(pause_s)
                if is_changed:
                    break

    async def _ask(self) -> bool:
        """Returns whether there was something new."""
        asked_at, is_changed = self._clock(), False
        try:
            is_changed = await self._refresh()
        except (BucketError, KeyStoreError) as error:
            if not self._is_failing:
                self._log.warning("keys_unreachable", error=str(error), num_known=len(self.ring))
            self._is_failing = True
        else:
            if self._is_failing:
                self._log.info("keys_reachable", num_known=len(self.ring))
            self._is_failing = False
            self.ring.heard(asked_at)
        return is_changed

    async def _refresh(self) -> bool:
        """Brings the ring up to date; returns whether the store has changed and all of it was read. Raises
        BucketError, KeyStoreError."""
        raise NotImplementedError

    def _replace_all(self, found: LoadedKeys) -> None:
        for key_id in {record.id for record in self.ring} - found.records.keys():
            self.ring.remove(key_id)
        for record in found.records.values():
            self._put(record)
        for name, problem in found.problems.items():
            self._show_problem(name, problem)

    def _put(self, record: KeyRecord) -> None:
        try:
            self.ring.put(record)
        except ValueError as error:
            self._show_problem(record.id, str(error))

    def _show_problem(self, name: str, problem: str) -> None:
        """Logs once what is wrong with a record."""
        if self._problems.get(name) != problem and len(self._problems) < len(self.ring) + 100:
            self._problems[name] = problem
            self._log.warning("key_record_refused", key_id=name[:50], error=problem[:300])


class BucketKeyWatch(KeyWatch):
    """Watches a bucket. Its puts are heard as they are published, which only wakes this up: what counts is read."""

    def __init__(
        self, connection: Connection, bucket: Bucket, ring: KeyRing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(ring, clock)
        self._connection = connection
        self._bucket = bucket
        self._known = BucketState("", 0)

    async def open(self) -> None:
        await self._connection.subscribe(f"$KV.{self._bucket.name}.>", self._hear)
        await super().open()

    def _hear(self, message: Msg) -> None:
        self._changed.set()

    async def _refresh(self) -> bool:
        state = await self._bucket.state()
        if state == self._known:
            return False
        if state.created != self._known.created or state.last_revision < self._known.last_revision:
            changes = await self._bucket.changes()  # another bucket of the same name
            self._problems.clear()
            self._replace_all(loaded(changes.entries))
        else:
            changes = await self._bucket.changes(self._known.last_revision)
            for entry in changes.entries:
                found = loaded([entry])
                if entry.key in found.records:
                    self._put(found.records[entry.key])
                else:  # deleted, or not a record any more
                    self.ring.remove(entry.key)
                for name, problem in found.problems.items():
                    self._show_problem(name, problem)
        self._known = BucketState(state.created, changes.last_revision)
        return self._known == state  # or a broker of the cluster that lags has answered: there is more to come


class FileKeyWatch(KeyWatch):
    """Watches a file, which every writer replaces."""

    def __init__(self, path: Path, ring: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(ring, clock)
        self._keys = FileKeys(path)
        self._known: tuple[int, int, int] | None = None

    async def _refresh(self) -> bool:
        try:
            status = self._keys.path.stat()
        except OSError as error:
            raise KeyStoreError(f"{self._keys.path}: {error.strerror}") from error
        known = (status.st_ino, status.st_mtime_ns, status.st_size)
        if known == self._known:
            return False
        self._replace_all(await self._keys.load())
        self._known = known
        return True
