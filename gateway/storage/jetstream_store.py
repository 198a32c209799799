"""A store in a JetStream key-value bucket, which all gateways of a broker share.

A record larger than a message is written in parts: the key `TENANT.NAME` has the first and the number of all, and is
written last; `TENANT.NAME.1` and so on have the others. A record of which the bucket has dropped a part is gone.

JetStream drops the oldest messages of a bucket that is full, whoever's they are. With several tenants, the bucket never
is: parts are small, and before a tenant writes more of them than its share has room for, its oldest go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from weakref import WeakValueDictionary

import nats.errors
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.kv import KeyValue

from tokenbus.gateway.storage.record_store import StorageLimits, StoreError
from tokenbus.protocol.bus.bucket import add_copied
from tokenbus.protocol.bus.connection import CancellationGuard, Connection
from tokenbus.protocol.wire import limits, subjects

_TIMEOUT_S = 2.0
_TURN_S = 10.0
"""A record waits so long for others of its tenant, if the broker does not answer; the end of its response waits too."""
_SMALL_PART_BYTES = 8 * 1024
"""The most bytes of a message where several tenants share the bucket: their messages are counted rather than their
bytes, since JetStream can drop all messages of a subject but a number of them."""
_FILLED = 0.85
"""The part of a share that its messages may fill: the rest is for their subjects and headers, and for records that
several gateways write at a time."""
_COUNT_BYTES = 4
"""The number of parts, at the beginning of the first."""


def bucket_of(prefix: str) -> str:
    """Returns the bucket of the system with that subject prefix."""
    return f"{prefix.replace('.', '_')}_responses"


class JetStreamStore:
    """Records that all gateways of a broker see."""

    place = "jetstream"

    def __init__(
        self, connection: Connection, bucket: str, storage: StorageLimits, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`timeout_s` is the time for one answer of the broker."""
        self.limits = storage
        self._js: JetStreamContext = connection.jetstream(timeout_s)
        self._bucket = bucket
        self._max_part_bytes = connection.max_payload - limits.MESSAGE_RESERVE_BYTES
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A tenant's records are written one at a time, or it would exceed its share meanwhile. Its lock is there while
        some are written or wait."""
        self._records = KeyValue(bucket, f"KV_{bucket}", f"$KV.{bucket}.", self._js, direct=True)

    def __repr__(self) -> str:
        return f"<JetStreamStore {self._bucket}>"

    async def open(self) -> bool:
        """Makes the bucket, or gives the one that is there these limits. Returns whether it is new.

        Raises StoreError, also if the broker has no JetStream."""
        with _failing():
            try:
                found = (await self._js.stream_info(f"KV_{self._bucket}")).config
            except js_errors.NotFoundError:
                found = None
                await add_copied(self._js, self._config(api.StreamConfig()))
            await self._drop_oldest("-", keep=1)  # fails unless it is permitted
            if found is None:
                return True
            if (found.max_age, found.max_bytes) != (self.limits.max_age_s, self.limits.max_bytes):
                await self._js.update_stream(self._config(found))
            return False

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        size = self._part_bytes - _COUNT_BYTES
        parts = [record[start : start + size] for start in range(0, len(record), size)] or [b""]
        parts[0] = len(parts).to_bytes(_COUNT_BYTES) + parts[0]
        async with self._turn_of(tenant):
            try:
                await self._put_all(tenant, name, parts)
            except (
                js_errors.NoStreamResponseError,
                js_errors.NotFoundError,
            ):  # the bucket and everything in it are gone
                await self.open()
                with _failing():
                    await self._put_all(tenant, name, parts)

    @contextlib.asynccontextmanager
    async def _turn_of(self, tenant: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(_TURN_S):
                await turn.acquire()
        except TimeoutError as error:
            raise StoreError("the broker takes too long to store other records") from error
        try:
            yield
        finally:
            turn.release()

    @property
    def _part_bytes(self) -> int:
        return min(self._max_part_bytes, _SMALL_PART_BYTES) if self.limits.num_tenants > 1 else self._max_part_bytes

    async def _make_room(self, tenant: str, num_parts: int) -> None:
        """Drops a tenant's oldest messages if it has no room for so many more."""
        room = int(_FILLED * self.limits.share_bytes / self._part_bytes)
        await self._drop_oldest(subjects.encode_name(tenant), keep=max(1, room - num_parts))

    async def _drop_oldest(self, tenant: str, keep: int) -> None:
        """Drops all but the newest messages of a tenant, whose name is encoded."""
        await self._js.purge_stream(f"KV_{self._bucket}", subject=f"$KV.{self._bucket}.{tenant}.>", keep=keep)

    async def _put_all(self, tenant: str, name: str, parts: list[bytes]) -> None:
        key = _key(tenant, name)
        with _failing(passed=(js_errors.NoStreamResponseError, js_errors.NotFoundError)):
            if self.limits.num_tenants > 1:
                await self._make_room(tenant, len(parts))
            for number in reversed(range(len(parts))):
                await self._records.put(_part(key, number), parts[number])

    async def get(self, tenant: str, name: str) -> bytes | None:
        key = _key(tenant, name)
        with _failing(passed=nats.errors.NoRespondersError):
            try:
                first = (await self._records.get(key)).value or b""
                rest = range(1, int.from_bytes(first[:_COUNT_BYTES]))
                found = await asyncio.gather(*(self._records.get(_part(key, number)) for number in rest))
            except js_errors.KeyNotFoundError:
                return None
            except nats.errors.NoRespondersError as error:
                if await self.open():
                    return None  # the bucket was gone, with everything in it
                raise StoreError("the bucket does not answer") from error
        return b"".join((first[_COUNT_BYTES:], *(part.value or b"" for part in found)))

    async def delete(self, tenant: str, name: str) -> None:
        key = _key(tenant, name)
        with _failing():
            try:
                first = (await self._records.get(key)).value or b""
            except js_errors.KeyNotFoundError:
                return
            for number in range(int.from_bytes(first[:_COUNT_BYTES])):
                await self._records.purge(_part(key, number))

    def _config(self, known: api.StreamConfig) -> api.StreamConfig:
        """Returns a bucket's configuration; what an operator has set otherwise, such as replicas, stays."""
        return known.evolve(
            name=f"KV_{self._bucket}",
            subjects=[f"$KV.{self._bucket}.>"],
            allow_direct=True,
            allow_rollup_hdrs=True,
            discard=api.DiscardPolicy.OLD,
            max_age=self.limits.max_age_s,
            max_bytes=self.limits.max_bytes,
            max_msgs_per_subject=1,
            duplicate_window=min(known.duplicate_window or 120.0, self.limits.max_age_s),
        )


def _key(tenant: str, name: str) -> str:
    return f"{subjects.encode_name(tenant)}.{name}"


def _part(key: str, number: int) -> str:
    return f"{key}.{number}" if number else key


@contextlib.contextmanager
def _failing(passed: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns the errors of nats-py into a StoreError, except `passed`."""
    try:
        with CancellationGuard():
            yield
    except passed:
        raise
    except js_errors.ServiceUnavailableError as error:
        raise StoreError(error.description or "the broker has no JetStream") from error
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise StoreError(str(error) or type(error).__name__) from error
