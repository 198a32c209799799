"""A cluster of brokers keeps stored responses in three copies. The test has real nats-servers."""

import asyncio
from pathlib import Path

from tests.support.cluster import Cluster
from tokenbus.gateway.storage.jetstream_store import JetStreamStore
from tokenbus.gateway.storage.record_store import StorageLimits, StoreError
from tokenbus.protocol.bus.bucket import Bucket, Copies
from tokenbus.protocol.bus.connection import BusSettings, connect


async def test_a_cluster_keeps_responses_in_three_copies(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, keeps=True)
    cluster.configure()
    try:
        for name in "abc":
            await cluster.add(name)
        connection = await connect(BusSettings(url=cluster["a"].url), "test")
        store = JetStreamStore(connection, "responses", StorageLimits(3_600.0, 1 << 20))
        async with asyncio.timeout(40.0):
            while True:
                try:
                    await store.open()
                    break
                except StoreError:  # the brokers have yet to agree on a leader
                    continue
        assert await Bucket(connection, "responses").copies() == Copies(3, is_clustered=True)
        await connection.close()
    finally:
        cluster.stop()
