"""A cluster keeps three copies of each bucket, and what is offline is never taken for missing. Every test has real
nats-servers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from structlog.testing import capture_logs

from tests.support.cluster import Cluster
from tokenbus.protocol.bus.bucket import (
    Bucket,
    BucketError,
    BucketLimits,
    BucketMissingError,
    BucketOfflineError,
    Copies,
    add_copied,
)
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect
from tokenbus.protocol.bus.copies import CopyKeeper
from tokenbus.protocol.telemetry.metrics import Gauge

LIMITS = BucketLimits(max_bytes=16 * 1024 * 1024)
ALL = Copies(3, is_clustered=True)
PATIENCE_S = 40.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three servers, none of which runs."""
    cluster = Cluster(tmp_path, keeps=True)
    cluster.configure()
    yield cluster
    cluster.stop()


@contextlib.asynccontextmanager
async def connected(cluster: Cluster, name: str) -> AsyncIterator[Connection]:
    connection = await connect(BusSettings(url=cluster[name].url), "test")
    yield connection
    await connection.close()


async def make(bucket: Bucket) -> None:
    """Makes a bucket as soon as the cluster allows it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(BucketOfflineError):
                await bucket.create(LIMITS)
                return


async def make_single(connection: Connection, bucket: Bucket) -> None:
    """Makes a bucket in one copy, as an earlier version did."""
    await make(Bucket(connection, "first"))  # the cluster is there
    config = api.StreamConfig(
        name=f"KV_{bucket.name}", subjects=[f"$KV.{bucket.name}.>"], allow_direct=True, num_replicas=1
    )
    await connection.jetstream(5.0).add_stream(config)


async def leader_of(connection: Connection, bucket: Bucket) -> str:
    info = await connection.jetstream(5.0).stream_info(f"KV_{bucket.name}")
    assert info.cluster is not None
    assert info.cluster.leader
    return info.cluster.leader


@pytest.mark.parametrize("order", ["abc", "cba"])
async def test_a_cluster_whose_servers_start_one_after_the_other_never_makes_a_single_copy(
    cluster: Cluster, order: str
) -> None:
    first, second, third = order
    await cluster.add(first)
    async with connected(cluster, first) as connection:
        bucket = Bucket(connection, "keys", timeout_s=0.2)
        with pytest.raises(BucketOfflineError):
            await bucket.create(LIMITS)
        await cluster.add(second)
        making = asyncio.create_task(make(bucket))
        await cluster.add(third)
        await making
        assert await bucket.copies() == ALL


class Brokers:
    """What makes streams for `add_copied`, and refuses those of some numbers of copies."""

    def __init__(self, refused: dict[int, int]) -> None:
        """`refused` has the broker's error codes by the number of copies."""
        self._refused = refused
        self.asked: list[int | None] = []

    async def add_stream(self, config: api.StreamConfig) -> api.StreamInfo:
        self.asked.append(config.num_replicas)
        if code := self._refused.get(config.num_replicas or 0):
            raise js_errors.APIError(code=500, err_code=code)
        return api.StreamInfo(config, api.StreamState(0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("refused", "asked"), [({}, [3]), ({3: 10074}, [3, 1]), ({3: 10005}, [3]), ({3: 10008}, [3]), ({3: 10047}, [3])]
)
async def test_one_copy_is_asked_for_only_where_the_broker_says_that_it_is_no_cluster(
    refused: dict[int, int], asked: list[int]
) -> None:
    brokers = Brokers(refused)
    with contextlib.suppress(js_errors.APIError):
        made = await add_copied(cast(JetStreamContext, brokers), api.StreamConfig(name="s"))
        assert made.num_replicas == asked[-1]
    assert brokers.asked == asked


async def test_a_broker_of_no_cluster_makes_one_copy_and_misses_none(jetstream: Connection) -> None:
    bucket = Bucket(jetstream, "alone")
    await bucket.create(LIMITS)
    copies = await bucket.copies()
    assert copies == Copies(1, is_clustered=False)
    assert copies.num_missing == 0


async def test_copies_that_are_missing_are_made_while_the_bucket_is_used_and_nothing_else_changes(
    cluster: Cluster,
) -> None:
    for name in "abc":
        await cluster.add(name)
    async with connected(cluster, "a") as connection:
        bucket, missing = Bucket(connection, "keys"), Gauge("missing", "", ("bucket",))
        await make_single(connection, bucket)
        await bucket.put("a", b"1")
        before = await connection.jetstream(5.0).stream_info("KV_keys")
        assert (await bucket.copies()).num_missing == 2
        keeper = CopyKeeper([bucket, Bucket(connection, "never_made")], missing)
        await keeper.look()
        assert await bucket.copies() == ALL
        assert missing.labels("keys")._value.get() == 0
        assert (await bucket.get("a") or b"")[1] == b"1"
        after = await connection.jetstream(5.0).stream_info("KV_keys")
        assert after.config == before.config.evolve(num_replicas=3)


class FewCopies(Bucket):
    """A bucket whose cluster can't make the copies that are missing."""

    def __init__(self, connection: Connection, problem: BucketError) -> None:
        super().__init__(connection, "few")
        self.problem: BucketError | None = problem
        self.num_asked = 0

    async def copies(self) -> Copies:
        self.num_asked += 1
        return Copies(1, is_clustered=True)

    async def complete_copies(self) -> Copies:
        if self.problem is not None:
            raise self.problem
        return ALL


async def test_copies_that_can_not_be_made_are_told_once_in_the_log_and_all_the_time_in_a_metric(
    jetstream: Connection,
) -> None:
    bucket = FewCopies(jetstream, BucketOfflineError("insufficient peers"))
    missing = Gauge("missing", "", ("bucket",))
    keeper = CopyKeeper([bucket], missing)
    with capture_logs() as logs:
        for _ in range(3):
            await keeper.look()
            assert missing.labels("few")._value.get() == 2
        bucket.problem = None
        await keeper.look()
        assert missing.labels("few")._value.get() == 0
    assert [(one["event"], one["bucket"], one["count"], one.get("error")) for one in logs] == [
        ("bucket_copies_missing", "few", 1, "insufficient peers"),
        ("bucket_copied", "few", 3, None),
    ]


async def test_a_bucket_whose_only_copy_is_away_is_offline_and_one_that_nobody_has_made_is_missing(
    cluster: Cluster,
) -> None:
    for name in "abc":
        await cluster.add(name)
    async with connected(cluster, "a") as connection:
        bucket = Bucket(connection, "keys")
        await make_single(connection, bucket)
        gone = await leader_of(connection, bucket)
    cluster[gone].kill()
    async with connected(cluster, next(name for name in "abc" if name != gone)) as connection:
        async with asyncio.timeout(PATIENCE_S):  # until the others have agreed that it is gone
            while True:
                try:
                    await Bucket(connection, "never_made").changes()
                except BucketMissingError:
                    break
                except BucketOfflineError:
                    continue
        kept = Bucket(connection, "keys", timeout_s=0.3)
        for ask in (kept.changes, kept.state, lambda: kept.get("a"), lambda: kept.put("a", b"1")):
            with pytest.raises(BucketOfflineError, match="away"):
                await ask()
        with pytest.raises(BucketOfflineError):  # it is not made again
            await kept.create(LIMITS)


def test_the_copies_of_a_bucket_are_those_that_the_broker_tells() -> None:
    from tokenbus.protocol.bus.bucket import _copies_in

    told = json.loads('{"config": {"num_replicas": 1}, "cluster": {"leader": "x"}}')
    assert _copies_in(told) == Copies(1, is_clustered=False)  # a broker of no cluster names itself
    assert _copies_in(told | {"cluster": {"name": "test"}}) == Copies(1, is_clustered=True)
    for damaged in ({}, {"config": {}}, {"config": {"num_replicas": "many"}}, {"config": 1}):
        with pytest.raises(BucketError, match="not understood"):
            _copies_in(damaged)
