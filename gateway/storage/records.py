"""The records of the gateway's tenants: counted, logged, and without the differences between stores."""

import asyncio
from collections.abc import Mapping

import structlog

from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.body import HeldBody
from tokenbus.gateway.storage.jetstream_store import JetStreamStore, bucket_of
from tokenbus.gateway.storage.record_store import (
    LateStore,
    MemoryStore,
    RecordStore,
    StorageLimits,
    StoreError,
)
from tokenbus.protocol.bus.connection import Connection

_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 600.0
"""The time until a missing bucket is looked for again, which doubles: a broker that forbids it logs each attempt."""


class Records:
    """All records of a gateway."""

    def __init__(
        self,
        store: RecordStore | None,
        limits: StorageLimits,
        metrics: GatewayMetrics,
        awaited: JetStreamStore | None = None,
    ) -> None:
        """`store` is None if nothing is kept; `awaited` takes its place once it can be opened."""
        self.store = store
        self._awaited = awaited
        self._limits = limits
        self._metrics = metrics
        self._is_failing = False

    def __repr__(self) -> str:
        return f"<Records {self.store!r}>"

    @property
    def max_record_bytes(self) -> int:
        """The most bytes of one record; 0: nothing is kept."""
        return 0 if self.store is None else self._limits.max_record_bytes

    def share_among(self, num_tenants: int) -> None:
        """Changes the number of tenants, each of which has an equal share."""
        self._limits = self._limits._replace(num_tenants=num_tenants)
        for store in (self.store, self._awaited):
            if store is not None:
                store.limits = self._limits

    @classmethod
    async def open(
        cls, connection: Connection, prefix: str, limits: StorageLimits, metrics: GatewayMetrics
    ) -> "Records":
        """Opens the broker's bucket or, while it has no JetStream or does not allow it, a store in memory."""
        if not limits.max_age_s or not limits.max_bytes:
            return cls(None, limits, metrics)
        shared = JetStreamStore(connection, bucket_of(prefix), limits)
        records = cls(MemoryStore(limits), limits, metrics, shared)
        if reason := await records.open_bucket():
            structlog.get_logger().info("responses_kept", place=MemoryStore.place, reason=reason)
        return records

    async def wait_for_bucket(self) -> None:
        """Tries to open the broker's bucket now and then, until it can: JetStream may have no leader yet, or be turned
        on later."""
        pause_s = _FIRST_PAUSE_S
        while self._awaited is not None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            await self.open_bucket()

    async def open_bucket(self) -> str:
        """Uses the broker's bucket from now on if it can be opened, else returns why not."""
        if self._awaited is None:
            return ""
        try:
            await self._awaited.open()
        except StoreError as error:
            return str(error)
        earlier, self.store, self._awaited = self.store, self._awaited, None
        if isinstance(earlier, MemoryStore) and earlier.num_bytes:
            self.store = LateStore(self.store, earlier)
        structlog.get_logger().info("responses_kept", place=self.store.place, reason=None)
        return ""

    def of(self, tenant: str, held: HeldBody | None = None) -> "TenantRecords":
        """Returns a tenant's records. What is read of them counts as part of a body that is held, if one is given."""
        return TenantRecords(self, tenant, held)

    async def read(self, tenant: str, name: str) -> bytes | None:
        """Returns a record, if there is one. Raises ApiError if the store fails."""
        if self.store is None:
            return None
        try:
            found = await self.store.get(tenant, name)
        except StoreError as error:
            self._failed("read", error)
            raise http_errors.ApiError(http_errors.STORE_FAILED) from error
        self._done("read", "missing" if found is None else "ok")
        return found

    async def keep(self, tenant: str, records: Mapping[str, bytes]) -> bool:
        """Stores records that belong together, in order. Returns whether they are stored."""
        if self.store is None:
            return False
        if sum(map(len, records.values())) > self.max_record_bytes:
            self._done("write", "too_large")
            return False
        try:
            for name, record in records.items():
                await self.store.put(tenant, name, record)
        except StoreError as error:
            self._failed("write", error)
            return False
        self._done("write", "ok")
        return True

    async def delete(self, tenant: str, *names: str) -> None:
        """Deletes records. Raises ApiError if the store fails."""
        if self.store is None:
            return
        try:
            for name in names:
                await self.store.delete(tenant, name)
        except StoreError as error:
            self._failed("delete", error)
            raise http_errors.ApiError(http_errors.STORE_FAILED) from error
        self._done("delete", "ok")

    def _done(self, operation: str, outcome: str) -> None:
        self._is_failing = False
        self._metrics.stored.labels(operation, outcome).inc()

    def _failed(self, operation: str, error: StoreError) -> None:
        self._metrics.stored.labels(operation, "failed").inc()
        if not self._is_failing:  # once an outage: each request of it would be a line
            structlog.get_logger().warning("response_store_failed", operation=operation, error=str(error))
        self._is_failing = True


class TenantRecords:
    """The records of one tenant, which are hidden from all others."""

    def __init__(self, records: Records, tenant: str, held: HeldBody | None = None) -> None:
        self._records = records
        self._tenant = tenant
        self._held = held

    def __repr__(self) -> str:
        return f"<TenantRecords of {self._tenant}>"

    async def read(self, name: str) -> bytes | None:
        """Returns a record, if there is one. Raises ApiError if the store fails, or memory is short."""
        found = await self._records.read(self._tenant, name)
        if self._held is not None:
            self._held.add(len(found or b""))
        return found

    async def keep(self, records: Mapping[str, bytes]) -> bool:
        return await self._records.keep(self._tenant, records)

    async def delete(self, *names: str) -> None:
        await self._records.delete(self._tenant, *names)
