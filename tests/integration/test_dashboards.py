"""Dashboards and alerts on a real Prometheus and a real system: no panel is empty, and alerts fire when they should."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import alert_rules
from tests.support.exact_client import until_ready
from tests.support.jetstream import jetstream_config
from tests.support.prometheus import WINDOW, Prometheus
from tests.support.raw_client import PREFIX
from tests.support.run_sender import RunSender
from tests.support.system import Gateway, System, running_gateway
from tokenbus import demo

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

    async def worker_of(self, served_name: str, *arguments: str, model: Path = demo.MODEL_PATH) -> None:
        """Starts a worker of another model, named like that model."""
        self.system.worker(served_name, "--metrics-port", "0", *arguments, model=model, served_name=served_name)
        self.prometheus.watch("tokenbus-worker", served_name, await self._port(served_name))

    @contextlib.asynccontextmanager
    async def gateway(self, folder: Path) -> AsyncIterator[Gateway]:
        """Runs a gateway, and asks it for one completion after another."""
        with running_gateway(self.system.url, folder, "--metrics-port", "0") as gateway:
            (page,) = gateway.log("status_page")
            self.prometheus.watch("tokenbus-gateway", "gateway", page["port"])
            asking = asyncio.create_task(ask_forever(gateway.url))
            try:
                yield gateway
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def kill(self, name: str) -> None:
        self.system.signal(name, signal.SIGKILL)
        await self.system.wait(name)

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
    system = await System.start(tmp_path, jetstream_config(tmp_path))
    yield Watched(system, prometheus)
    await system.stop()
    prometheus.stop()


Work = Callable[[int], Awaitable[object]]


@contextlib.asynccontextmanager
async def load(*works: Work) -> AsyncIterator[None]:
    """Does each kind of work a few times a second, with numbers that count up."""

    async def repeat(work: Work) -> None:
        for number in itertools.count():
            await work(number)
            await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(repeat(work)) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_forever(url: str) -> None:
    """Asks a gateway for streamed completions, and for one that it refuses."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        while True:
            async for _ in await client.completions.create(model="demo", prompt=SHARED, max_tokens=20, stream=True):
                pass
            with contextlib.suppress(openai.BadRequestError):
                await client.completions.create(model="demo", prompt=SHARED, max_tokens=-1)
            await asyncio.sleep(0.2)


ELSEWHERE = "tokenbus_auth_"
"""Beside this system there is no `tokenbus auth`, which a broker without keys does not ask."""


def on_dashboards() -> list[str]:
    """Yields every expression of every panel, with every value of its variables."""
    found = []
    for path in sorted(alert_rules.DASHBOARDS.glob("*.json")):
        targets = [target for panel in json.loads(path.read_text())["panels"] for target in panel.get("targets", [])]
        found += [chosen(target["expr"]) for target in targets if ELSEWHERE not in target["expr"]]
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
        async with asyncio.timeout(60):
            while empty := [expression for expression in empty if not await prometheus.values(expression)]:
                await asyncio.sleep(0.1)
    assert not empty, "\n".join(empty)


async def test_under_load_no_panel_and_no_rule_is_without_data_and_no_alert_fires(
    watched: Watched, tmp_path: Path
) -> None:
    prometheus = watched.prometheus
    await watched.router("--usage", "--audit")
    for name in ("one", "two"):
        await watched.worker(name, "--max-num-seqs", "2", "--vllm-metrics", "--host-cache-mib", "64")
    await watched.worker_of("words")
    shelf = ("--engine", "sim", "--model", str(SIM), "--served-name", "other", "--memory-budget-mib", "150")
    await watched.worker_of("shelf", *shelf, model=SIM)
    lending = ("--model", str(demo.ONNX_PATH), "--served-name", "awake", "--context-length", "512", "--kv-budget", "4")
    await watched.worker_of("asleep", *lending, model=demo.ONNX_PATH)
    bare = await watched.system.connect()
    await until_ready(bare, 5)
    sender = RunSender(bare.nats)
    await sender.open("one", "two")

    async def ask(_: int) -> None:
        await bare.ask({"prompt": SHARED, "max_tokens": 40})

    async def constrain(number: int) -> None:
        await bare.ask({"prompt": "Hi", "regex": f"a{{{number + 1}}}"}, subject=f"{PREFIX}.generate.words")

    async def take_turns(number: int) -> None:
        subject = f"{PREFIX}.generate.{('shelf', 'other')[number % 2]}"
        await bare.ask({"prompt": "Hi", "max_tokens": 1}, subject=subject)

    async def borrow(number: int) -> None:
        """Asks two models for more than the memory that they share holds, one after the other."""
        subject = f"{PREFIX}.generate.{('asleep', 'awake')[number % 2]}"
        await asyncio.gather(*(bare.ask({"prompt": "Hi", "max_tokens": 20}, subject=subject) for _ in range(2)))

    async def fetch(number: int) -> None:
        token_ids = [100 + number, *range(200, 700)]
        await sender.ask("one", token_ids)
        await sender.ask("two", token_ids, fetch_from=sender.source("one"))

    async with load(*[ask] * 8, constrain, take_turns, borrow, fetch), watched.gateway(tmp_path):
        groups = (await prometheus.get("rules"))["groups"]
        ruled: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
        recorded = [rule["name"] for rule in ruled if rule["type"] == "recording"]
        alerted = {name for rule in ruled for name in alert_rules.METRIC.findall(rule["query"])}
        await until_data(
            prometheus, [*on_dashboards(), *recorded, *sorted(one for one in alerted if ELSEWHERE not in one)]
        )
        for series, label in offers():
            assert await prometheus.get(f"label/{label}/values", **{"match[]": series}), (series, label)
        for group in (await prometheus.get("rules"))["groups"]:
            assert {(rule["health"], rule.get("lastError")) for rule in group["rules"]} == {("ok", None)}
        assert await prometheus.firing() == set()
        twice = "sum(vllm:generation_tokens_total) - sum(tokenbus_worker_generation_tokens_total{worker_id=~'one|two'})"
        assert await prometheus.values(twice) == [0.0]
        assert await prometheus.values("sum(vllm:generation_tokens_total) > 0")


@pytest.mark.long
async def test_alerts_fire_when_workers_and_routers_are_killed_and_clear_when_they_are_back(watched: Watched) -> None:
    prometheus = watched.prometheus
    await watched.router()
    await asyncio.gather(watched.worker("one"), watched.worker("two"))
    bare = await watched.system.connect()
    await until_ready(bare, 2)
    await until_data(prometheus, ["model:tokenbus_workers_ready:max == 2"])

    await watched.kill("one")
    await prometheus.until_firing("TokenbusWorkerLost", "TokenbusWorkerDown")
    await watched.kill("two")
    await prometheus.until_firing("TokenbusNoWorkerReady")
    await until_data(prometheus, ['ALERTS{alertname="TokenbusNoWorkerReady",model="demo",alertstate="firing"}'])
    assert await prometheus.values('count(ALERTS{alertname="TokenbusNoWorkerReady",alertstate="firing"})') == [1.0]
    await asyncio.gather(watched.worker("one"), watched.worker("two"))
    await prometheus.until_clear("TokenbusNoWorkerReady", "TokenbusWorkerLost", "TokenbusWorkerDown")
    assert await prometheus.values("model:tokenbus_workers_ready:max") == [2.0]

    await watched.kill("router")
    await prometheus.until_firing("TokenbusRouterDown", "TokenbusNoRouter")
    await watched.router()
    await prometheus.until_clear("TokenbusRouterDown", "TokenbusNoRouter")


@pytest.mark.long
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
            await asyncio.sleep(0.05)
    for name in names:
        await bare.nats.request(f"{PREFIX}.cancel.{name}", b"", timeout=5)
    await prometheus.until_clear("TokenbusQueueFilling", "TokenbusOverloaded")
    assert await prometheus.values("model:tokenbus_queue_depth:sum") == [0.0]
