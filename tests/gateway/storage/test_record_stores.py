"""Every store of records keeps them as long as it says: in memory, and in a bucket of a real broker."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tokenbus.cli.console import nats_server
from tokenbus.gateway.storage import jetstream_store
from tokenbus.gateway.storage.jetstream_store import JetStreamStore
from tokenbus.gateway.storage.record_store import LateStore, MemoryStore, RecordStore, StorageLimits, StoreError
from tokenbus.protocol.bus import connection as nats

DAY = StorageLimits(max_age_s=86_400, max_bytes=8 * 1024 * 1024)
MakeStore = Callable[[StorageLimits], Awaitable[RecordStore]]
_buckets = (f"bucket_{number}" for number in itertools.count())


class Clock:
    """The time of a store in memory, which passes at will."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "jetstream"])
def make(request: pytest.FixtureRequest, jetstream: nats.Connection) -> MakeStore:
    async def made(limits: StorageLimits) -> RecordStore:
        if request.param == "memory":
            return MemoryStore(limits)
        store = JetStreamStore(jetstream, next(_buckets), limits)
        assert await store.open()
        return store

    return made


async def test_a_record_is_there_for_its_tenant_only_until_it_is_deleted(make: MakeStore) -> None:
    store = await make(DAY)
    await store.put("acme", "resp_1", b"one")
    await store.put("acme", "resp_2", b"")
    assert await store.get("acme", "resp_1") == b"one"
    assert await store.get("acme", "resp_2") == b""
    assert await store.get("globex", "resp_1") is None
    await store.delete("globex", "resp_1")
    await store.delete("acme", "resp_1")
    await store.delete("acme", "resp_1")
    assert await store.get("acme", "resp_1") is None
    assert await store.get("acme", "resp_2") == b""


@pytest.mark.parametrize("num_bytes", [1024 * 1024 - 4 * 1024 - 4, 3 * 1024 * 1024])
async def test_a_record_may_be_larger_than_a_message(make: MakeStore, num_bytes: int) -> None:
    store, record = await make(DAY), bytes(range(251)) * (num_bytes // 251 + 1)
    await store.put("a tenant.with dots", "resp_1", record)
    assert await store.get("a tenant.with dots", "resp_1") == record
    await store.delete("a tenant.with dots", "resp_1")
    assert await store.get("a tenant.with dots", "resp_1") is None


async def test_a_full_store_drops_its_oldest_records_and_never_half_of_one(make: MakeStore) -> None:
    store, record = await make(DAY), bytes(3 * 1024 * 1024)
    for number in range(4):
        await store.put("acme", f"resp_{number}", record)
    found = [await store.get("acme", f"resp_{number}") for number in range(4)]
    assert found == [None, None, record, record]


async def test_an_expired_record_is_gone_from_memory() -> None:
    clock = Clock()
    store = MemoryStore(StorageLimits(10.0, 1_000), clock)
    await store.put("acme", "resp_1", b"one")
    clock.now = 9.0
    assert await store.get("acme", "resp_1") == b"one"
    clock.now = 10.0
    assert await store.get("acme", "resp_1") is None
    await store.put("acme", "resp_2", b"two")
    assert repr(store).startswith("<MemoryStore 1 records")


async def test_what_memory_held_before_a_bucket_came_is_readable_until_it_expires_and_then_takes_no_memory() -> None:
    now = 0.0
    limits = StorageLimits(60.0, 1 << 20)
    earlier = MemoryStore(limits, clock=lambda: now)
    await earlier.put("acme", "old", b"x" * 1_000)
    store = LateStore(MemoryStore(limits), earlier)
    assert await store.get("acme", "old") == b"x" * 1_000
    now = 61.0
    await store.put("acme", "new", b"y")
    assert await store.get("acme", "old") is None
    assert await store.get("acme", "new") == b"y"
    assert earlier.num_bytes == 0


async def test_what_a_tenant_writes_takes_nothing_from_another_one(make: MakeStore) -> None:
    store = await make(DAY._replace(num_tenants=2))
    quiet = {f"resp_{number}": bytes([number]) * 300_000 for number in range(6)}
    for name, record in quiet.items():
        await store.put("acme", name, record)
    await asyncio.gather(*(store.put("globex", f"resp_{number}", bytes(200_000)) for number in range(60)))
    assert {name: await store.get("acme", name) for name in quiet} == quiet
    kept = [number for number in range(60) if await store.get("globex", f"resp_{number}") is not None]
    assert 10 < len(kept) <= DAY.max_bytes // 2 // 200_000
    assert kept == list(range(60 - len(kept), 60))


async def test_a_tenant_whose_share_has_become_smaller_makes_room_with_its_next_record() -> None:
    store = MemoryStore(StorageLimits(10.0, 40_000))
    for number in range(3):
        await store.put("acme", f"resp_{number}", bytes(10_000))
    store.limits = store.limits._replace(num_tenants=2)
    await store.put("acme", "resp_3", bytes(4_000))
    found = [await store.get("acme", f"resp_{number}") for number in range(4)]
    assert [one is not None for one in found] == [False, False, True, True]


async def test_many_small_records_take_no_more_memory_than_few_large_ones() -> None:
    store = MemoryStore(StorageLimits(10.0, 100_000))
    for number in range(1_000):
        await store.put("acme", f"resp_{number}", b"")
    assert store.num_bytes <= 100_000
    assert await store.get("acme", "resp_0") is None
    assert await store.get("acme", "resp_999") == b""


async def test_an_expired_record_is_gone_from_a_bucket(jetstream: nats.Connection) -> None:
    store = JetStreamStore(jetstream, next(_buckets), StorageLimits(0.2, 1_000_000))
    await store.open()
    await store.put("acme", "resp_1", b"one")
    async with asyncio.timeout(10):
        while await store.get("acme", "resp_1") is not None:
            await asyncio.sleep(0.02)


async def test_gateways_share_a_bucket_which_takes_over_new_limits(jetstream: nats.Connection) -> None:
    bucket = next(_buckets)
    first, second = (JetStreamStore(jetstream, bucket, DAY._replace(max_age_s=age)) for age in (86_400.0, 3_600.0))
    assert await first.open()
    await first.put("acme", "resp_1", b"one")
    assert not await second.open()
    assert await second.get("acme", "resp_1") == b"one"
    config = (await jetstream.jetstream(1.0).stream_info(f"KV_{bucket}")).config
    assert (config.max_age, config.max_bytes) == (3_600, DAY.max_bytes)


async def test_a_bucket_that_is_lost_is_made_again(jetstream: nats.Connection) -> None:
    bucket = next(_buckets)
    store = JetStreamStore(jetstream, bucket, DAY)
    await store.open()
    await store.put("acme", "resp_1", b"one")
    await jetstream.jetstream(1.0).delete_stream(f"KV_{bucket}")
    assert await store.get("acme", "resp_1") is None
    await jetstream.jetstream(1.0).delete_stream(f"KV_{bucket}")
    await store.put("acme", "resp_2", b"two")
    assert await store.get("acme", "resp_2") == b"two"


async def test_a_broker_without_jetstream_or_room_is_told(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f"jetstream {{ store_dir: '{tmp_path}', max_file_store: 1MB }}")
    for chosen in (None, config):
        broker = await nats_server.start(0, tmp_path / "nats.log", chosen)
        jetstream = await nats.connect(nats.BusSettings(url=broker.url), "test")
        try:
            with pytest.raises(StoreError):
                await JetStreamStore(jetstream, "bucket", DAY).open()
        finally:
            await jetstream.close()
            broker.stop()


async def test_a_broker_that_is_gone_fails_a_call_and_loses_nothing_else(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f"jetstream {{ store_dir: '{tmp_path}' }}")
    broker = await nats_server.start(0, tmp_path / "nats.log", config)
    jetstream = await nats.connect(nats.BusSettings(url=broker.url), "test")
    store = JetStreamStore(jetstream, "bucket", DAY, timeout_s=0.1)
    await store.open()
    broker.stop()
    try:
        with pytest.raises(StoreError):
            await store.put("acme", "resp_1", b"one")
        with pytest.raises(StoreError):
            await store.get("acme", "resp_1")
        with pytest.raises(StoreError):
            await store.delete("acme", "resp_1")
    finally:
        await jetstream.close()


async def test_nothing_is_left_of_tenants_that_store_nothing_now(jetstream: nats.Connection) -> None:
    store = JetStreamStore(jetstream, next(_buckets), DAY)
    await store.open()
    await asyncio.gather(*(store.put(f"tenant-{number % 10}", "resp_1", b"one") for number in range(20)))
    assert not store._turns


async def test_records_of_a_tenant_do_not_wait_for_each_other_forever(
    jetstream: nats.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_store, "_TURN_S", 0.1)
    store = JetStreamStore(jetstream, next(_buckets), DAY)
    await store.open()
    is_slow = asyncio.Event()

    async def stand_still(tenant: str, name: str, parts: list[bytes]) -> None:
        await is_slow.wait()

    with monkeypatch.context() as patched:
        patched.setattr(store, "_put_all", stand_still)
        first, *others = [asyncio.create_task(store.put("acme", f"resp_{number}", b"one")) for number in range(9)]
        async with asyncio.timeout(5):
            for one in others:
                with pytest.raises(StoreError, match="takes too long"):
                    await one
        is_slow.set()
        await first
    await store.put("acme", "resp_9", b"nine")
    assert await store.get("acme", "resp_9") == b"nine"
