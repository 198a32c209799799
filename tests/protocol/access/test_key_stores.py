"""Both stores of keys keep the same promises, and a watch brings what they hold into a process's ring."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.protocol.access.test_keys import made
from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError, KeyRing
from tokenbus.protocol.access.key_stores import BucketKeys, FileKeys, KeyConflictError, KeyStore, KeyStoreError
from tokenbus.protocol.access.key_watch import BucketKeyWatch, FileKeyWatch, KeyWatch
from tokenbus.protocol.access.keys import KeyRecord, NewKey
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import Bucket, BucketState, Changes

_names = (f"bucket_{number}" for number in itertools.count())


@pytest.fixture(params=["bucket", "file"])
def store(request: pytest.FixtureRequest, jetstream: nats.Connection, tmp_path: Path) -> KeyStore:
    return BucketKeys(Bucket(jetstream, next(_names))) if request.param == "bucket" else FileKeys(tmp_path / "keys")


def watch_of(store: KeyStore, ring: KeyRing, jetstream: nats.Connection) -> KeyWatch:
    if isinstance(store, BucketKeys):
        return BucketKeyWatch(jetstream, store.bucket, ring)
    assert isinstance(store, FileKeys)
    return FileKeyWatch(store.path, ring)


@contextlib.asynccontextmanager
async def watched(store: KeyStore, jetstream: nats.Connection) -> AsyncIterator[tuple[KeyRing, asyncio.Event]]:
    """A ring that is kept up to date, and an event that each change of it sets."""
    ring, changed = KeyRing(), asyncio.Event()
    watch = watch_of(store, ring, jetstream)
    ring.on_change.append(lambda before, after: changed.set())
    await watch.open()
    changed.clear()
    async with asyncio.timeout(20):
        task = asyncio.create_task(watch.watch())
        yield ring, changed
        task.cancel()


def revoked(record: KeyRecord) -> KeyRecord:
    return msgspec.structs.replace(record, revoked_at=1.0)


async def test_a_key_is_there_once_it_is_added_and_no_other_of_its_id_can_be(store: KeyStore) -> None:
    await store.create()
    await store.create()
    _, record = made()
    assert await store.get(record.id) is None
    await store.add(record)
    found = await store.get(record.id)
    assert found is not None
    assert found.record == record
    with pytest.raises(KeyConflictError):
        await store.add(record)
    assert await store.load() == ({record.id: record}, {})


async def test_of_two_changes_at_once_the_second_is_told_so(store: KeyStore) -> None:
    await store.create()
    _, record = made()
    await store.add(record)
    found = await store.get(record.id)
    assert found is not None
    rotated = msgspec.structs.replace(record, hash="0" * 64)
    ended = await asyncio.gather(
        store.replace(revoked(record), found.revision), store.replace(rotated, found.revision), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in ended) == ["KeyConflictError", "NoneType"]


async def test_a_store_that_is_not_there_says_so(store: KeyStore) -> None:
    for act in (store.load, lambda: store.get("a" * 10), lambda: store.add(made()[1])):
        with pytest.raises(KeyStoreError):
            await act()


async def test_a_revoked_key_is_refused_as_soon_as_the_watch_has_heard_of_it(
    store: KeyStore, jetstream: nats.Connection
) -> None:
    await store.create()
    key, record = made()
    await store.add(record)
    async with watched(store, jetstream) as (ring, changed):
        assert ring.find(key.text, time.time(), time.monotonic()) == record
        found = await store.get(record.id)
        assert found is not None
        await store.replace(revoked(record), found.revision)
        await changed.wait()
        with pytest.raises(KeyRefusedError) as refused:
            ring.find(key.text, time.time(), time.monotonic())
        assert refused.value.problem is KeyProblem.NOT_VALID_NOW


async def test_a_bucket_that_is_gone_and_made_again_has_only_the_keys_of_the_new_one(
    jetstream: nats.Connection,
) -> None:
    store = BucketKeys(Bucket(jetstream, next(_names)))
    await store.create()
    (_, old), (_, new) = made(), made()
    await store.add(old)
    async with watched(store, jetstream) as (ring, changed):
        assert list(ring) == [old]
        await jetstream.jetstream(5.0).delete_stream(f"KV_{store.bucket.name}")
        await store.create()
        await store.add(new)
        while list(ring) != [new]:
            await changed.wait()
            changed.clear()


@pytest.mark.parametrize("payload", [b"", b"{}", b"\xff", b"null", b"[" * 1_000, b'{"v":1,"id":"aaaaaaaaaa"}'])
async def test_what_is_no_record_is_no_key_any_more_and_disturbs_no_other(
    jetstream: nats.Connection, payload: bytes
) -> None:
    store = BucketKeys(Bucket(jetstream, next(_names)))
    await store.create()
    (_, one), (_, other) = made(), made()
    await store.add(one)
    await store.add(other)
    async with watched(store, jetstream) as (ring, changed):
        await store.bucket.put(one.id, payload)
        await changed.wait()
        assert list(ring) == [other]
    again = KeyRing()
    await BucketKeyWatch(jetstream, store.bucket, again).open()
    assert list(again) == [other]


async def test_a_record_under_another_keys_name_is_no_key(jetstream: nats.Connection) -> None:
    store = BucketKeys(Bucket(jetstream, next(_names)))
    await store.create()
    _, record = made()
    await store.bucket.put("a" * 10, msgspec.json.encode(record))
    assert (await store.load()).records == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "must be"), (b"[]", "must be"), (b'{"keys": NaN}', "must be"), (b'{"keys": [{}]}', "key 1")],
)
async def test_a_file_that_is_none_of_keys_is_refused_and_not_written(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyStoreError, match=problem):
        await FileKeys(path).add(made()[1])
    assert path.read_bytes() == content


async def test_a_file_of_keys_is_its_owners_alone(tmp_path: Path) -> None:
    store = FileKeys(tmp_path / "keys")
    await store.create()
    await store.add(made()[1])
    assert os.stat(store.path).st_mode & 0o777 == 0o600
    store.path.chmod(0o640)
    with pytest.raises(KeyStoreError, match="chmod 600"):
        await store.load()


class LaggingBucket(Bucket):
    """A bucket whose answers come from a broker that knows it only up to a revision."""

    def __init__(self, connection: nats.Connection, name: str) -> None:
        super().__init__(connection, name)
        self.known = 0

    async def changes(self, after: int = 0, keys: str = ">") -> Changes:
        entries = [one for one in (await super().changes(after, keys)).entries if one.revision <= self.known]
        return Changes(entries, entries[-1].revision if entries else after)


async def test_what_a_lagging_broker_tells_does_not_count_as_all_keys(jetstream: nats.Connection) -> None:
    bucket = LaggingBucket(jetstream, next(_names))
    store, ring = BucketKeys(bucket), KeyRing()
    await store.create()
    (first, one), (second, other) = made(), made()
    await store.add(one)
    await store.add(other)

    def problem_of(key: NewKey) -> KeyProblem:
        with pytest.raises(KeyRefusedError) as refused:
            ring.find(key.text, 0.0, now)
        return refused.value.problem

    now = 0.0
    bucket.known = 1
    watch = BucketKeyWatch(jetstream, bucket, ring, lambda: now)
    await watch.open()
    assert [problem_of(key) for key in (first, second)] == [KeyProblem.UNAVAILABLE] * 2
    bucket.known = 2
    await watch.open()
    assert {record.id for record in ring} == {one.id, other.id}
    await store.replace(msgspec.structs.replace(other, revoked_at=1.0), "2")
    now = 4.0
    await watch.open()
    assert ring.silent_s(now) == 4.0, "there is a change that is not known"
    now = 9.0
    await watch.open()
    assert ring.silent_s(now) == 0.0, "the last revision was purged"


async def test_a_put_that_is_heard_before_the_broker_has_stored_it_is_read_all_the_same(
    jetstream: nats.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.protocol.access.key_watch._INTERVAL_S", 3_600.0)
    store = BucketKeys(Bucket(jetstream, next(_names)))
    await store.create()
    async with watched(store, jetstream) as (ring, changed):
        old, real, times = await store.bucket.state(), store.bucket.state, iter(range(2))

        async def before_it_is_stored() -> BucketState:
            return old if next(times, None) is not None else await real()

        monkeypatch.setattr(store.bucket, "state", before_it_is_stored)
        await store.add(made()[1])
        await changed.wait()
        assert len(ring) == 1
