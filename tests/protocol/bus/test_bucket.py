"""A bucket of a real broker: compare-and-set, and its changes by revision."""

import asyncio
import itertools
from unittest.mock import ANY

import pytest

from tokenbus.protocol.bus import bucket as buckets
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import Bucket, BucketConflictError, BucketLimits, BucketMissingError

LIMITS = BucketLimits(max_bytes=16 * 1024 * 1024)
_names = (f"bucket_{number}" for number in itertools.count())


@pytest.fixture
async def bucket(jetstream: nats.Connection) -> Bucket:
    made = Bucket(jetstream, next(_names))
    await made.create(LIMITS)
    return made


async def test_of_two_who_put_a_key_with_the_same_revision_one_is_told_of_the_conflict(bucket: Bucket) -> None:
    first = await bucket.create_entry("a", b"1")
    second = await bucket.update("a", b"2", first)
    with pytest.raises(BucketConflictError):
        await bucket.update("a", b"3", first)
    with pytest.raises(BucketConflictError):
        await bucket.create_entry("a", b"4")
    found = await bucket.get("a")
    assert found == buckets.Entry("a", b"2", second, ANY)


async def test_a_deleted_key_is_not_there_can_be_made_again_and_is_a_change(bucket: Bucket) -> None:
    revision = await bucket.create_entry("a", b"1")
    with pytest.raises(BucketConflictError):
        await bucket.delete("a", revision + 1)
    await bucket.delete("a", revision)
    assert await bucket.get("a") is None
    assert [(one.key, one.value) for one in (await bucket.changes(revision)).entries] == [("a", None)]
    again = await bucket.create_entry("a", b"2")
    assert [(one.value, one.revision) for one in (await bucket.changes()).entries] == [(b"2", again)]


async def test_changes_are_the_last_entries_of_all_keys_with_a_higher_revision_in_order(bucket: Bucket) -> None:
    count = 3_000  # several pages
    await asyncio.gather(*(bucket.put(f"k.{number}", b"x" * 2_000) for number in range(count)))
    found = await bucket.changes()
    assert {one.key for one in found.entries} == {f"k.{number}" for number in range(count)}
    assert [one.revision for one in found.entries] == sorted(one.revision for one in found.entries)
    assert found.last_revision == (await bucket.state()).last_revision == count
    assert (await bucket.changes(count)) == ([], count)
    last = await bucket.put("k.7", b"new")
    await bucket.put("other", b"not asked for")
    assert [(one.key, one.value) for one in (await bucket.changes(count, "k.*")).entries] == [("k.7", b"new")]
    assert (await bucket.changes(last - 1)).last_revision == last + 1


async def test_a_bucket_that_is_not_there_or_full_says_so(jetstream: nats.Connection) -> None:
    missing = Bucket(jetstream, next(_names))
    for asked in (missing.state(), missing.get("a"), missing.put("a", b""), missing.changes()):
        with pytest.raises(BucketMissingError):
            await asked
    full = Bucket(jetstream, next(_names))
    await full.create(BucketLimits(max_bytes=2_000))
    await full.put("a", bytes(1_000))
    with pytest.raises(buckets.BucketError, match="maximum bytes exceeded"):
        await full.put("b", bytes(1_000))
    assert await full.get("a") == buckets.Entry("a", bytes(1_000), 1, ANY), "what was there stays"


async def test_a_bucket_is_made_once_and_keeps_what_an_operator_has_set(
    bucket: Bucket, jetstream: nats.Connection
) -> None:
    before = await bucket.state()
    await Bucket(jetstream, bucket.name).create(BucketLimits(max_bytes=1))
    await bucket.put("a", bytes(100))
    assert (await bucket.state()).created == before.created
