"""Dashboards and alerts on a real Prometheus and a real system: no panel is empty, and alerts fire when they should."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import alert_rules
from tests.support.exact_client import until_ready
from tests.support.prometheus import WINDOW, Prometheus
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System

pytestmark = alert_rules.needs("prometheus")

SIM = Path("dynamo")
SHARED = "There was once a fox that lived in a wood. " * 20
ENDLESS = {"prompt": "x", "max_tokens": 6_000}


class Watched:
    """A router and two workers whose addresses Prometheus always knows."""

    def __init__(self, system: System, prometheus: Prometheus) -> None:
        self.system = system
        self.prometheus = prometheus

    async def router(self, *arguments: str) -> None:
        self.system.router("router", "--metrics-port", "0", *arguments)
        self.prometheus.watch("tokenbus-router", "router", await self._port("router"))

    async def worker(self, name: str, *arguments: str) -> None:
        self.system.worker(name, "--metrics-port", "0", "--engine", "sim", *arguments, model=SIM)
        self.prometheus.watch("tokenbus-worker", name, await self._port(name))

    def kill(self, name: str) -> None:
        self.system.signal(name, signal.SIGKILL)
        self.system.wait(name)

    async def _port(self, name: str) -> int:
        """Returns the metrics port of the newest process of this name."""
        async with asyncio.timeout(60):
            while True:
                pages = [line for line in self.system.log(name) if line["event"] == "status_page"]
                latest = pages[-1]["port"] if len(pages) == self.system.num_starts(name) else None
                if isinstance(latest, int):
                    return latest
                await asyncio.sleep(0.02)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    prometheus = await Prometheus.start(tmp_path / "prometheus")
    system = await System.start(tmp_path)
    yield Watched(system, prometheus)
    await system.stop()
    prometheus.stop()


@contextlib.asynccontextmanager
async def load(bare: RawClient, clients: int) -> AsyncIterator[None]:
    """Runs clients that send one request after another."""

    async def ask() -> None:
        while True:
            await bare.ask({"prompt": SHARED, "max_tokens": 40})

    tasks = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def on_dashboards() -> list[str]:
    """Yields every expression of every panel, with every value of its variables."""
    found = []
    for path in sorted(alert_rules.DASHBOARDS.glob("*.json")):
        targets = [target for panel in json.loads(path.read_text())["panels"] for target in panel.get("targets", [])]
        found += [chosen(target["expr"]) for target in targets]
    assert found
    return found


def chosen(expression: str) -> str:
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", WINDOW))


def offers() -> set[tuple[str, str]]:
    """Yields series and label of every variable of every dashboard."""
    text = "".join(path.read_text() for path in alert_rules.DASHBOARDS.glob("*.json")).replace('\\"', '"')
    found = re.findall(r'"label_values\((.+), (\w+)\)"', text)
    assert found
    return {(chosen(series), label) for series, label in found}


async def until_data(prometheus: Prometheus, expressions: list[str]) -> None:
    """Waits until every expression has had at least one value."""
    empty = expressions
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(25):
            while empty := [expression for expression in empty if not await prometheus.values(expression)]:
                await asyncio.sleep(0.1)
    assert not empty


async def test_under_load_no_panel_and_no_rule_is_without_data_and_no_alert_fires(watched: Watched) -> None:
    prometheus = watched.prometheus
    await watched.router()
    for name in ("one", "two"):
        await watched.worker(name, "--max-num-seqs", "2", "--vllm-metrics")
    bare = await watched.system.connect()
    await until_ready(bare, 2)
    async with load(bare, clients=8):
        groups = (await prometheus.get("rules"))["groups"]
        ruled: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
        recorded = [rule["name"] for rule in ruled if rule["type"] == "recording"]
        alerted = {name for rule in ruled for name in alert_rules.METRIC.findall(rule["query"])}
        await until_data(prometheus, [*on_dashboards(), *recorded, *sorted(alerted)])
        for series, label in offers():
            assert await prometheus.get(f"label/{label}/values", **{"match[]": series}), (series, label)
        for group in (await prometheus.get("rules"))["groups"]:
            assert {(rule["health"], rule.get("lastError")) for rule in group["rules"]} == {("ok", None)}
        assert await prometheus.firing() == set()
        twice = "sum(vllm:generation_tokens_total) - sum(tokenbus_worker_generation_tokens_total)"
        assert await prometheus.values(twice) == [0.0]
        assert await prometheus.values("sum(vllm:generation_tokens_total) > 0")


async def test_alerts_fire_when_workers_and_routers_are_killed_and_clear_when_they_are_back(watched: Watched) -> None:
    prometheus = watched.prometheus
    await watched.router()
    await asyncio.gather(watched.worker("one"), watched.worker("two"))
    bare = await watched.system.connect()
    await until_ready(bare, 2)
    await until_data(prometheus, ["model:tokenbus_workers_ready:max == 2"])

    watched.kill("one")
    await prometheus.until_firing("TokenbusWorkerLost", "TokenbusWorkerDown")
    watched.kill("two")
    await prometheus.until_firing("TokenbusNoWorkerReady")
    await until_data(prometheus, ['ALERTS{alertname="TokenbusNoWorkerReady",model="demo",alertstate="firing"}'])
    assert await prometheus.values('count(ALERTS{alertname="TokenbusNoWorkerReady",alertstate="firing"})') == [1.0]
    await asyncio.gather(watched.worker("one"), watched.worker("two"))
    await prometheus.until_clear("TokenbusNoWorkerReady", "TokenbusWorkerLost", "TokenbusWorkerDown")
    assert await prometheus.values("model:tokenbus_workers_ready:max") == [2.0]

    watched.kill("router")
    await prometheus.until_firing("TokenbusRouterDown", "TokenbusNoRouter")
    await watched.router()
    await prometheus.until_clear("TokenbusRouterDown", "TokenbusNoRouter")


async def test_alerts_fire_when_the_queue_is_full_and_clear_when_it_is_worked_off(watched: Watched) -> None:
    prometheus = watched.prometheus
    await watched.router("--max-queued-requests", "4")
    await watched.worker("one", "--max-num-seqs", "1")
    bare = await watched.system.connect()
    await until_ready(bare, 1)

    names = [f"endless-{number}" for number in range(6)]
    for name in names:
        await bare.generate(ENDLESS | {"id": name})
    async with asyncio.timeout(30):
        while not {"TokenbusQueueFilling", "TokenbusOverloaded"} <= await prometheus.firing():
            refused = await bare.ask({"prompt": "x"})
            assert refused.messages[-1]["error"]["code"] == "overloaded"
    for name in names:
        await bare.nats.request(f"{PREFIX}.cancel.{name}", b"", timeout=5)
    await prometheus.until_clear("TokenbusQueueFilling", "TokenbusOverloaded")
    assert await prometheus.values("model:tokenbus_queue_depth:sum") == [0.0]
