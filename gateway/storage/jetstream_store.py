"""A store in a JetStream key-value bucket, which all gateways of a broker share.

A record larger than a message is written in parts: the key `TENANT.NAME` has the first and the number of all, and is
written last; `TENANT.NAME.1` and so on have the others. A record of which the bucket has dropped a part is gone."""

import asyncio
import contextlib
from collections.abc import Iterator

import nats.errors
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.kv import KeyValue

from tokenbus.gateway.storage.record_store import StorageLimits, StoreError
from tokenbus.protocol.bus.connection import CancellationGuard, Connection
from tokenbus.protocol.wire import limits, subjects

_TIMEOUT_S = 2.0
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
        self._js: JetStreamContext = connection.jetstream(timeout_s)
        self._bucket = bucket
        self._limits = storage
        self._part_bytes = connection.max_payload - limits.MESSAGE_RESERVE_BYTES
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
                await self._js.add_stream(self._config(api.StreamConfig()))
                return True
            if (found.max_age, found.max_bytes) != (self._limits.max_age_s, self._limits.max_bytes):
                await self._js.update_stream(self._config(found))
            return False

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        size = self._part_bytes - _COUNT_BYTES
        parts = [record[start : start + size] for start in range(0, len(record), size)] or [b""]
        parts[0] = len(parts).to_bytes(_COUNT_BYTES) + parts[0]
        try:
            await self._put_all(_key(tenant, name), parts)
        except js_errors.NoStreamResponseError:  # the bucket is gone, with everything in it
            await self.open()
            with _failing():
                await self._put_all(_key(tenant, name), parts)

    async def _put_all(self, key: str, parts: list[bytes]) -> None:
        with _failing(passed=js_errors.NoStreamResponseError):
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
            max_age=self._limits.max_age_s,
            max_bytes=self._limits.max_bytes,
            max_msgs_per_subject=1,
            duplicate_window=min(known.duplicate_window or 120.0, self._limits.max_age_s),
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
