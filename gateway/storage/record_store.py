"""The interface of a store of records, and the one in this process's memory."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

_SHARES = 16
"""A record may take up to this share of the store, so that no single one empties it."""


class StorageLimits(NamedTuple):
    """The limits of a store; when it is full, the oldest records make room."""

    max_age_s: float
    max_bytes: int

    @property
    def max_record_bytes(self) -> int:
        return self.max_bytes // _SHARES


class StoreError(Exception):
    """The store can't be reached, or does not accept the record."""


class RecordStore(Protocol):
    """Records by tenant and name. A name is written once."""

    place: str
    """`jetstream` or `memory`."""

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
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._entries)} records, {self.num_bytes} bytes>"

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        self._drop((tenant, name))
        self._entries[tenant, name] = _Entry(record, self._clock() + self._limits.max_age_s)
        self.num_bytes += len(record)
        while self._entries:
            oldest = next(iter(self._entries))
            if self.num_bytes <= self._limits.max_bytes and self._entries[oldest].expires_at > self._clock():
                break
            self._drop(oldest)

    async def get(self, tenant: str, name: str) -> bytes | None:
        entry = self._entries.get((tenant, name))
        return entry.record if entry is not None and entry.expires_at > self._clock() else None

    async def delete(self, tenant: str, name: str) -> None:
        self._drop((tenant, name))

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= len(entry.record)
