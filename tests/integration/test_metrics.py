"""The status page of real processes: metrics add up and health checks are right."""

import asyncio
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.exact_client import until_ready
from tests.support.system import System
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import subjects
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

KINDS = ("finish_reason", "code", "state", "policy")


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def port_of(system: System, name: str) -> int:
    await system.until_logged(name, "status_page")
    port = next(line["port"] for line in system.log(name) if line["event"] == "status_page")
    assert isinstance(port, int)
    return port


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def samples(port: int) -> dict[str, float]:
    """Returns the sums of all samples by name and by the label that distinguishes kinds."""
    _, text = await get(port, "/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kind = next(
                (sample.labels[k] for k in ("finish_reason", "code", "state", "policy") if k in sample.labels), ""
            )
            found[f"{sample.name} {kind}".strip()] = found.get(f"{sample.name} {kind}".strip(), 0) + sample.value
    return found


async def test_what_was_served_is_what_is_counted(system: System) -> None:
    system.router("router", "--metrics-port", "0")
    router = await port_of(system, "router")
    assert (await get(router, "/readyz")) == (503, "no worker is known\n")
    system.worker("worker", "--metrics-port", "0", "--replicas", "2")
    worker = await port_of(system, "worker")
    bare = await system.connect()
    await until_ready(bare, 2)
    assert (await get(worker, "/readyz"))[0] == (await get(router, "/readyz"))[0] == 200
    asked = {"prompt": "Once upon a time there was a little fox", "max_tokens": 5, "ignore_eos": True}
    answers = [await bare.ask(asked) for _ in range(6)]
    await bare.ask({"prompt": "x", "max_tokens": -1})
    await bare.ask({"prompt": "x"}, subject="tokenbus.v1.generate.nobody")
    usages = [answer.messages[-1]["usage"] for answer in answers]
    seen = await samples(worker)
    assert seen["tokenbus_worker_requests_total length"] == 6
    assert seen["tokenbus_worker_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert seen["tokenbus_worker_generation_tokens_total"] == 30
    assert seen["tokenbus_worker_prefix_cache_hits_tokens_total"] == sum(usage["cached_tokens"] for usage in usages) > 0
    assert seen["tokenbus_worker_inter_token_latency_seconds_count"] == 24
    assert seen["tokenbus_worker_time_per_output_token_seconds_count"] == 6
    decode_s = seen["tokenbus_worker_decode_time_seconds_sum"]
    assert seen["tokenbus_worker_time_per_output_token_seconds_sum"] == pytest.approx(decode_s / 4)
    assert seen["tokenbus_worker_time_to_first_token_seconds_count"] == 6
    assert seen["tokenbus_worker_requests_running"] == seen["tokenbus_worker_kv_blocks used"] == 0
    told = await samples(router)
    assert told["tokenbus_router_placements_total kv"] == 6
    assert told["tokenbus_router_request_errors_total invalid_request"] == 1
    assert told["tokenbus_router_request_errors_total no_worker"] == 1
    assert told["tokenbus_router_workers ready"] == 2
    assert told["tokenbus_router_prompt_tokens_total"] == seen["tokenbus_worker_prompt_tokens_total"]


async def test_counts_go_on_when_the_engine_is_killed_and_health_tells_of_a_drain(system: System) -> None:
    system.router("router")
    system.worker("worker", "--metrics-port", "0", "--grace-s", "5")
    port = await port_of(system, "worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    await bare.ask({"prompt": "Once", "max_tokens": 8, "ignore_eos": True})
    stream = await bare.generate({"prompt": "Once upon", "max_tokens": 200, "ignore_eos": True})
    await stream.until(10)

    os.kill(card["pids"]["engine"], signal.SIGKILL)
    assert (await stream.terminal(30))["finish_reason"] == "length"
    seen = await samples(port)
    assert seen["tokenbus_worker_engine_restarts_total"] == 1
    assert 8 + 200 - 50 <= seen["tokenbus_worker_generation_tokens_total"] <= 8 + 200 + 50
    long = await bare.generate({"prompt": "Once upon", "max_tokens": 1_500, "ignore_eos": True})
    await long.until(3)
    system.signal("worker", signal.SIGTERM)
    await system.until_logged("worker", "draining")
    assert (await get(port, "/readyz"))[0] == 503
    assert (await get(port, "/livez"))[0] == 200
    assert await system.wait("worker") == 0


async def test_a_router_is_ready_only_while_it_takes_requests(system: System) -> None:
    system.worker("worker")
    await system.until_logged("worker", "engine_ready")
    bus = await connection.connect(connection.BusSettings(url=system.url), name="router")
    router = Router(bus, subjects.Subjects(), "router", RouterSettings(), random.Random(1), NoopTracer())
    assert router.unready_reason == "no worker is known"
    await router.open()
    assert router.unready_reason == ""
    await router.stop_intake()
    assert router.unready_reason == "it takes no requests"
    await bus.close()


async def test_a_port_that_is_taken_is_one_clear_line(system: System) -> None:
    system.router("first", "--metrics-port", "0")
    port = await port_of(system, "first")
    system.router("second", "--metrics-port", str(port))
    assert await system.wait("second") == 2
    assert f"--metrics-port {port} on 127.0.0.1" in system.text_log("second")
