"""What commands say while brokers of the cluster are away: offline is not missing."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from nats.js import api

from tests.support.cluster import Cluster
from tokenbus.cli import main
from tokenbus.cli.commands import doctor
from tokenbus.cli.commands.doctor import Finding
from tokenbus.protocol import late_logger
from tokenbus.protocol.access.key_stores import BucketKeys, KeyStoreError
from tokenbus.protocol.bus.bucket import Bucket
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three servers, none of which runs."""
    cluster = Cluster(tmp_path, keeps=True)
    cluster.configure()
    yield cluster
    cluster.stop()
    structlog.reset_defaults()  # commands have configured this process's log
    late_logger.configure_first(None)


async def made_by_hand(connection: Connection, num_copies: int) -> None:
    """Makes the bucket of keys as soon as the cluster is there."""
    config = api.StreamConfig(
        name="KV_tokenbus_v1_keys",
        subjects=["$KV.tokenbus_v1_keys.>"],
        allow_direct=True,
        num_replicas=num_copies,
    )
    store = BucketKeys(Bucket(connection, "first"))
    async with asyncio.timeout(40.0):
        while True:
            try:
                await store.create()
                break
            except KeyStoreError:
                continue
    await connection.jetstream(5.0).add_stream(config)


async def findings(cluster: Cluster, name: str) -> list[Finding]:
    options = argparse.Namespace(**vars(main.parse(["doctor", "--nats", cluster[name].url])))
    return [one async for one in doctor.check_broker(options) if "tokenbus_v1" in one.what]


async def said(capsys: pytest.CaptureFixture[str], cluster: Cluster, name: str, *arguments: str) -> str:
    """Returns what `tokenbus keys` says on standard error as it fails."""
    options = main.parse(["keys", *arguments, "--nats", cluster[name].url])
    assert await asyncio.to_thread(options.run, options) == 1
    return capsys.readouterr().err


async def test_a_key_that_is_not_made_since_brokers_are_away_says_so(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":  # no two of three that have never met the third decide anything
        await cluster.add(name)
    words = await said(capsys, cluster, "a", "create")
    assert "no key was made" in words
    assert "away" in words or "too few brokers" in words


async def test_keys_whose_only_broker_is_away_are_offline_and_doctor_tells_of_copies_that_are_missing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        await cluster.add(name)
    connection = await connect(BusSettings(url=cluster["a"].url), "test")
    await made_by_hand(connection, 1)
    (found,) = await findings(cluster, "a")
    assert found.mark == "bad"
    assert "tokenbus_v1_keys in 1 of 3 copies" in found.what
    info = await connection.jetstream(5.0).stream_info("KV_tokenbus_v1_keys")
    await connection.close()
    assert info.cluster is not None
    gone = str(info.cluster.leader)
    cluster[gone].kill()
    left = next(name for name in "abc" if name != gone)
    words = await said(capsys, cluster, left, "list")
    assert "offline" in words
    assert "no keys yet" not in words
    offline = next(one for one in await findings(cluster, left) if "keys" in one.what)
    assert (offline.mark, "can't be reached" in offline.what) == ("bad", True)


async def test_doctor_counts_three_copies_in_a_cluster(cluster: Cluster) -> None:
    for name in "abc":
        await cluster.add(name)
    connection = await connect(BusSettings(url=cluster["a"].url), "test")
    await made_by_hand(connection, 3)
    await connection.close()
    assert await findings(cluster, "b") == [Finding("ok", "the cluster keeps tokenbus_v1_keys in 3 copies")]
