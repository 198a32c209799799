"""The interface of a store of records, and the one in this process's memory."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

_RECORDS = 16
"""A record may take up to this part of a tenant's share, so that no single one empties it."""
_ENTRY_BYTES = 512
"""The memory that a record takes beside its bytes."""


class StorageLimits(NamedTuple):
    """The limits of a store. Each tenant has an equal share; when that is used up, the tenant's oldest records make
    room, and never another one's."""

    max_age_s: float
    max_bytes: int
    num_tenants: int = 1

    @property
    def share_bytes(self) -> int:
        return self.max_bytes // max(1, self.num_tenants)

    @property
    def max_record_bytes(self) -> int:
        return self.share_bytes // _RECORDS


class StoreError(Exception):
    """The store can't be reached, or does not accept the record."""


class RecordStore(Protocol):
    """Records by tenant and name. A name is written once."""

    place: str
    """`jetstream` or `memory`."""
    limits: StorageLimits
    """May be replaced while the store is open."""

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        """Raises StoreError."""
        ...

    async def get(self, tenant: str, name: str) -> bytes | None:
        """Returns a record, or None if there is none or it has expired. Raises StoreError."""
        ...

    async def delete(self, tenant: str, name: str) -> None:
        """Deletes a record if there is one. Raises StoreError."""
        ...


class _Entry(NamedTuple):
    record: bytes
    expires_at: float


class MemoryStore:
    """Records that only this process has."""

    place = "memory"

    def __init__(self, limits: StorageLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._shares: dict[str, _Share] = {}

    def __repr__(self) -> str:
        num_records = sum(len(share.entries) for share in self._shares.values())
        return f"<MemoryStore {num_records} records, {self.num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        return sum(share.num_bytes for share in self._shares.values())

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        share, now = self._shares.setdefault(tenant, _Share()), self._clock()
        share.drop(name)
        share.add(name, _Entry(record, now + self.limits.max_age_s))
        self._drop_expired(now)
        while share.num_bytes > self.limits.share_bytes:
            share.drop_oldest()
        while self.num_bytes > self.limits.max_bytes:  # records of tenants that are gone
            max(self._shares.values(), key=lambda one: one.num_bytes).drop_oldest()
        self._drop_expired(now)

    def drop_expired(self) -> None:
        """Gives the memory of records back that have expired, which `put` does as well."""
        self._drop_expired(self._clock())

    def _drop_expired(self, now: float) -> None:
        for one in self._shares.values():
            one.drop_expired(now)
        self._shares = {tenant: share for tenant, share in self._shares.items() if share.entries}

    async def get(self, tenant: str, name: str) -> bytes | None:
        share = self._shares.get(tenant)
        entry = None if share is None else share.entries.get(name)
        return entry.record if entry is not None and entry.expires_at > self._clock() else None

    async def delete(self, tenant: str, name: str) -> None:
        if (share := self._shares.get(tenant)) is not None:
            share.drop(name)


class LateStore:
    """A store that was not there at first. What was kept in memory until then is read from there until it expires."""

    def __init__(self, store: RecordStore, earlier: MemoryStore) -> None:
        self.place = store.place
        self._store = store
        self._earlier = earlier

    def __repr__(self) -> str:
        return f"<LateStore {self._store!r} after {self._earlier!r}>"

    @property
    def limits(self) -> StorageLimits:
        return self._store.limits

    @limits.setter
    def limits(self, limits: StorageLimits) -> None:
        self._store.limits = self._earlier.limits = limits

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        self._earlier.drop_expired()
        await self._store.put(tenant, name, record)

    async def get(self, tenant: str, name: str) -> bytes | None:
        earlier = await self._earlier.get(tenant, name)
        return earlier if earlier is not None else await self._store.get(tenant, name)

    async def delete(self, tenant: str, name: str) -> None:
        await self._earlier.delete(tenant, name)
        await self._store.delete(tenant, name)


class _Share:
    """The records of one tenant, the oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0

    def add(self, name: str, entry: _Entry) -> None:
        self.entries[name] = entry
        self.num_bytes += len(entry.record) + _ENTRY_BYTES

    def drop(self, name: str) -> None:
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= len(entry.record) + _ENTRY_BYTES

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.entries)))

    def drop_expired(self, now: float) -> None:
        while self.entries and next(iter(self.entries.values())).expires_at <= now:
            self.drop_oldest()
