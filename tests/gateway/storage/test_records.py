"""A store that fails loses no answer, is counted, and is logged once for an outage."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from tokenbus.cli.console import nats_server
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.gateway.storage.record_store import MemoryStore, StorageLimits, StoreError
from tokenbus.gateway.storage.records import Records
from tokenbus.protocol.bus import connection as nats

LIMITS = StorageLimits(100.0, 1_600)


class BrokenStore(MemoryStore):
    """Fails while it is told to."""

    is_broken = True

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        self._check()
        await super().put(tenant, name, record)

    async def get(self, tenant: str, name: str) -> bytes | None:
        self._check()
        return await super().get(tenant, name)

    async def delete(self, tenant: str, name: str) -> None:
        self._check()
        await super().delete(tenant, name)

    def _check(self) -> None:
        if self.is_broken:
            raise StoreError("full")


def counts(metrics: GatewayMetrics) -> dict[tuple[Any, ...], float]:
    (family,) = metrics.stored.collect()
    return {
        (one.labels["operation"], one.labels["outcome"]): one.value
        for one in family.samples
        if one.name.endswith("_total") and one.value
    }


async def test_a_failing_store_is_told_counted_and_logged_once() -> None:
    metrics = GatewayMetrics()
    store = BrokenStore(LIMITS)
    records = Records(store, LIMITS, metrics).of("acme")
    with structlog.testing.capture_logs() as lines:
        assert not await records.keep({"a": b"1"})
        with pytest.raises(ApiError) as raised:
            await records.read("a")
        with pytest.raises(ApiError):
            await records.delete("a")
        assert (raised.value.response.status, raised.value.response.retryable) == (503, True)
        store.is_broken = False
        assert await records.keep({"a": b"1"})
        assert await records.read("a") == b"1"
        assert await records.read("b") is None
        store.is_broken = True
        assert not await records.keep({"a": b"1"})
    assert [line["operation"] for line in lines if line["event"] == "response_store_failed"] == ["write", "write"]
    assert counts(metrics) == {
        ("write", "failed"): 2,
        ("read", "failed"): 1,
        ("delete", "failed"): 1,
        ("write", "ok"): 1,
        ("read", "ok"): 1,
        ("read", "missing"): 1,
    }


async def test_records_that_are_too_large_together_are_not_kept() -> None:
    metrics = GatewayMetrics()
    records = Records(MemoryStore(LIMITS), LIMITS, metrics).of("acme")
    assert await records.keep({"a": bytes(50), "b": bytes(50)})
    assert not await records.keep({"c": bytes(50), "d": bytes(51)})
    assert await records.read("c") is None
    assert counts(metrics)["write", "too_large"] == 1


async def test_where_nothing_is_kept_nothing_is_found() -> None:
    off = Records(None, StorageLimits(0, 0), GatewayMetrics())
    assert off.max_record_bytes == 0
    assert not await off.of("acme").keep({"a": b""})
    assert await off.of("acme").read("a") is None
    await off.of("acme").delete("a")


async def test_a_bucket_that_comes_later_is_used_and_what_was_kept_until_then_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.gateway.storage.records._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("tokenbus.gateway.storage.records._MAX_PAUSE_S", 0.01)
    broker = await nats_server.start(0, tmp_path / "nats.log")
    connection = await nats.connect(nats.BusSettings(url=broker.url), "test")
    limits = StorageLimits(3_600.0, 16 * 1024 * 1024)
    try:
        with structlog.testing.capture_logs() as lines:
            records = await Records.open(connection, "p.v1", limits, GatewayMetrics())
            assert await records.keep("acme", {"early": b"1", "deleted": b"1"})
            waiting = asyncio.create_task(records.wait_for_bucket())
            broker.stop()
            broker = await nats_server.start(int(broker.url.rpartition(":")[2]), tmp_path / "nats.log", store=tmp_path)
            async with asyncio.timeout(30):
                await waiting
        assert [line["place"] for line in lines if line["event"] == "responses_kept"] == ["memory", "jetstream"]
        await records.delete("acme", "deleted")
        assert await records.keep("acme", {"late": b"2"})
        assert [await records.read("acme", name) for name in ("early", "deleted", "late")] == [b"1", None, b"2"]
        other = await Records.open(connection, "p.v1", limits, GatewayMetrics())
        assert await other.read("acme", "late") == b"2", "all gateways have it"
        records.share_among(7)
        assert records.store is not None
        assert records.store.limits.num_tenants == 7
    finally:
        await connection.close()
        broker.stop()
