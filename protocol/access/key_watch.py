"""Keeps a process's key ring up to date with the store."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nats.aio.msg import Msg

from tokenbus.protocol import late_logger
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


_LAG_S = 5.0
"""The longest that a broker of the cluster may take to learn of a put."""


class _Refreshed(NamedTuple):
    is_changed: bool
    """Whether the store has changed."""
    is_complete: bool
    """Whether all of it is known now."""


class KeyWatch:
    """The base of both watches: asks the store again and again, and logs when it begins and ends to fail."""

    def __init__(self, ring: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self.ring = ring
        self._clock = clock
        self._changed = asyncio.Event()
        self._problems: dict[str, str] = {}
        self._is_failing = False
        self._log = late_logger.get_logger()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ring!r}>"

    async def open(self) -> None:
        """Loads the keys once, if the store can be reached."""
        for pause_s in (*_AGAIN_S, 0.0):
            await self._ask()
            if self._is_failing or not self.ring.is_silent(self._clock()):
                break
            await asyncio.sleep(pause_s)

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
        asked_at, found = self._clock(), _Refreshed(is_changed=False, is_complete=False)
        try:
            found = await self._refresh()
        except (BucketError, KeyStoreError) as error:
            if not self._is_failing:
                self._log.warning("keys_unreachable", error=str(error), num_known=len(self.ring))
            self._is_failing = True
        else:
            if self._is_failing:
                self._log.info("keys_reachable", num_known=len(self.ring))
            self._is_failing = False
            if found.is_complete:
                self.ring.heard(asked_at)
        return found.is_changed and found.is_complete

    async def _refresh(self) -> "_Refreshed":
        """Brings the ring up to date. Raises BucketError, KeyStoreError."""
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
    """Watches a bucket. Its puts are heard as they are published, which only wakes this up: what counts is read.

    In a cluster, the broker whose answer is read may lag behind the one that tells the last revision: then there is
    more to come, and what is known does not count as confirmed. After `_LAG_S` the last revision is one that was
    purged."""

    def __init__(
        self, connection: Connection, bucket: Bucket, ring: KeyRing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(ring, clock)
        self._connection = connection
        self._bucket = bucket
        self._known = self._told = BucketState("", 0)
        self._told_since = 0.0

    async def open(self) -> None:
        await self._connection.subscribe(f"$KV.{self._bucket.name}.>", self._hear)
        await super().open()

    def _hear(self, message: Msg) -> None:
        self._changed.set()

    async def _refresh(self) -> _Refreshed:
        state, now = await self._bucket.state(), self._clock()
        if state == self._known:
            return _Refreshed(is_changed=False, is_complete=True)
        if state != self._told:
            self._told, self._told_since = state, now
        is_settled = now - self._told_since >= _LAG_S
        if state.created != self._known.created or state.last_revision < self._known.last_revision:
            changes = await self._bucket.changes()  # another bucket of the same name
            if changes.last_revision < state.last_revision and not is_settled:
                return _Refreshed(is_changed=True, is_complete=False)
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
        return _Refreshed(is_changed=True, is_complete=changes.last_revision >= state.last_revision or is_settled)


class FileKeyWatch(KeyWatch):
    """Watches a file, which every writer replaces."""

    def __init__(self, path: Path, ring: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(ring, clock)
        self._keys = FileKeys(path)
        self._known: tuple[int, int, int] | None = None

    async def _refresh(self) -> _Refreshed:
        try:
            status = self._keys.path.stat()
        except OSError as error:
            raise KeyStoreError(f"{self._keys.path}: {error.strerror}") from error
        known = (status.st_ino, status.st_mtime_ns, status.st_size)
        if known == self._known:
            return _Refreshed(is_changed=False, is_complete=True)
        self._replace_all(await self._keys.load())
        self._known = known
        return _Refreshed(is_changed=True, is_complete=True)
