"""A router's counts in the bucket of a real broker: saved once, also where that was gone or full for a while."""

import datetime
import random
import time
from itertools import count
from pathlib import Path

import pytest

from tokenbus.cli.console import nats_server
from tokenbus.protocol.access import usage, usage_store
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageQuery
from tokenbus.protocol.access.usage_store import UsageStore
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import Bucket, BucketLimits
from tokenbus.router.usage.writer import UsageWriter

CHAT = UsageKind("generate")
ONE = Counts(requests=1, prompt_tokens=3, completion_tokens=2)
_names = (f"usage_{number}" for number in count())


@pytest.fixture
def bucket(jetstream: nats.Connection) -> Bucket:
    return Bucket(jetstream, next(_names))


def writer(bucket: Bucket, incarnation: str = "r1", num_days: int = 400, **options: float) -> UsageWriter:
    return UsageWriter(bucket, incarnation, num_days, random.Random(1), **options)


async def total(bucket: Bucket, **asked: object) -> Counts:
    today = usage.day_at(time.time())
    first = usage.parse_day("3d", today)
    query = UsageQuery(first, today, ("day",))._replace(**asked)
    return usage.total_of((await UsageStore(bucket).report(query)).rows)


async def test_what_was_counted_is_read_by_tenant_key_and_model_and_saved_once(bucket: Bucket) -> None:
    one, other = writer(bucket), writer(bucket, "r2")
    for tenant, key, model in (("acme", "k1", "chat"), ("acme", "", "chat"), ("globex.1", "k2", "qwen 2.5")):
        one.count(tenant, key, model, CHAT, ONE)
        other.count(tenant, key, model, UsageKind("generate", "pirate"), ONE)
    assert one.unsaved_s() > 0
    for _ in range(2):
        await one.save()
        await other.save()
    assert one.unsaved_s() == 0
    assert await total(bucket) == Counts(requests=6, prompt_tokens=18, completion_tokens=12)
    assert (await total(bucket, tenant="globex.1")).requests == 2
    assert (await total(bucket, tenant="acme", key="")).requests == 2
    assert (await total(bucket, model="qwen 2.5")).requests == 2
    report = await UsageStore(bucket).report(UsageQuery(one.today, one.today, ("key", "adapter")))
    assert [row.group for row in report.rows] == [
        (key, adapter) for key in ("", "k1", "k2") for adapter in ("", "pirate")
    ]


async def test_where_the_broker_has_no_room_for_the_bucket_it_is_known_why_until_it_has(tmp_path: Path) -> None:
    config = tmp_path / "small.conf"
    config.write_text(f"jetstream {{ store_dir: '{tmp_path}', max_file_store: 10MB }}\n")
    server = await nats_server.start(0, tmp_path / "nats.log", config)
    try:
        connection = await nats.connect(nats.BusSettings(url=server.url), "test")
        full = Bucket(connection, "usage")
        one = writer(full)
        one.count("acme", "k1", "chat", CHAT, ONE)
        await one.save()
        assert one.problem == "insufficient storage resources available"
        await full.create(BucketLimits(max_bytes=1024 * 1024))
        await one.save()
        assert (one.problem, await total(full)) == ("", ONE)
        await connection.close()
    finally:
        server.stop()


async def test_a_bucket_that_is_deleted_is_made_again_with_all_that_is_known(
    bucket: Bucket, jetstream: nats.Connection
) -> None:
    router = writer(bucket)
    router.count("acme", "k1", "chat", CHAT, ONE)
    router.count("acme", "k2", "chat", CHAT, ONE)
    await router.save()
    await jetstream.jetstream(2.0).delete_stream(f"KV_{bucket.name}")
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.save()
    assert router.unsaved_s() > 0
    await router.save()
    assert (await total(bucket)).requests == 3

    await jetstream.jetstream(2.0).delete_stream(f"KV_{bucket.name}")
    await UsageStore(bucket).create(400)  # by another router
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.save()
    await router.save()
    assert (await total(bucket)).requests == 4


async def test_counts_that_do_not_fit_in_a_full_bucket_are_saved_once_there_is_room(
    bucket: Bucket, jetstream: nats.Connection
) -> None:
    await bucket.create(BucketLimits(max_bytes=2_000))
    await bucket.put("filling", bytes(1_900))
    router = writer(bucket)
    router.count("acme", "k1", "chat", CHAT, ONE)
    failures = []
    router.on_failure = lambda: failures.append(1)
    await router.save()
    assert failures
    assert router.unsaved_s() > 0
    entry = await bucket.get("filling")
    assert entry is not None
    await bucket.purge("filling", entry.revision)
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.save()
    assert (await total(bucket)).requests == 2


async def test_a_write_whose_answer_was_lost_is_not_counted_twice(bucket: Bucket) -> None:
    router = writer(bucket)
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.save()
    (counter,) = router.counters
    written = await bucket.update(counter.key, usage.encode_rows(counter.rows), counter.revision)
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.save()
    assert counter.revision == written
    await router.save()
    assert (await total(bucket)).requests == 2


async def test_a_router_that_stops_in_the_middle_of_a_write_saves_all(bucket: Bucket) -> None:
    router = writer(bucket)
    for key in ("k1", "k2"):
        router.count("acme", key, "chat", CHAT, ONE)
    await router.save()
    for counter in router.counters:  # the answers to these never arrive
        counter.rows[CHAT].add(ONE)
        await bucket.update(counter.key, usage.encode_rows(counter.rows), counter.revision)
    router.count("acme", "k1", "chat", CHAT, ONE)
    await router.close()
    assert router.unsaved_s() == 0
    assert (await total(bucket)).requests == 5


async def test_entries_are_kept_for_as_many_days_as_the_last_router_was_told(
    bucket: Bucket, jetstream: nats.Connection
) -> None:
    for num_days in (400, 30, 30):
        await writer(bucket, num_days=num_days).save()
        config = (await jetstream.jetstream(2.0).stream_info(f"KV_{bucket.name}")).config
        assert config.max_age == num_days * 86_400


async def test_shards_of_earlier_days_are_folded_into_one_and_counted_once_at_every_step(
    bucket: Bucket,
) -> None:
    await UsageStore(bucket).create(400)
    yesterday = usage.parse_day("yesterday", writer(bucket).today)
    keys = [usage.entry_key(usage.UsageName(yesterday, "acme", "k1", "chat"), f"r{number}-0") for number in range(3)]
    for key in keys:
        await bucket.put(key, usage.encode_rows({CHAT: ONE}))
    for _ in range(3):
        assert (await total(bucket)).requests == 3
        await writer(bucket, quiet_s=-60.0).fold()
    assert [one.key for one in (await bucket.changes()).entries] == [
        usage.entry_key(usage.UsageName(yesterday, "acme", "k1", "chat"), usage.FOLDED)
    ]
    assert (await total(bucket)).requests == 3


async def test_an_entry_that_is_written_again_is_not_purged(bucket: Bucket) -> None:
    await bucket.create(BucketLimits(max_bytes=1_000_000))
    first = await bucket.put("a", b"1")
    second = await bucket.put("a", b"2")
    await bucket.purge("a", first)
    assert (await bucket.get("a")) is not None
    await bucket.purge("a", second)
    assert await bucket.get("a") is None
    assert await bucket.changes() == ([], 0)


async def test_the_time_of_the_broker_is_read(bucket: Bucket) -> None:
    await bucket.create(BucketLimits(max_bytes=1_000_000))
    assert abs(usage_store.unix_time_of(await bucket.broker_time()) - time.time()) < 60
    assert usage_store.unix_time_of("2026-11-24T00:00:01.123456789Z") == pytest.approx(
        datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC).timestamp() + 1.123456789
    )
