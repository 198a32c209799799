"""A worker's memory and uptime reach whoever asks a router, and its own pages and lines say what memory is free."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import System
from tests.support.wire_answers import answer_of
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    system.router("router")
    system.worker("w1", "--metrics-port", "0")
    yield system
    await system.stop()


async def told(client: WireClient) -> messages.Card:
    """Waits until a router knows how a worker is whose engine serves."""
    async with asyncio.timeout(60):
        while True:
            try:
                cards = (await client.models()).cards
            except errors.RequestError:
                cards = []
            for card in cards:
                if card.health is not None and card.health.engine_uptime_s:
                    return card
            await asyncio.sleep(0.1)


def page(system: System, path: str) -> bytes:
    port = next(line["port"] for line in system.log("w1") if line["event"] == "status_page")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: bytes = answer.read()
    return text


async def test_memory_and_uptime_are_told_to_routers_and_shown_on_the_status_page(system: System) -> None:
    async with await WireClient.connect(system.url) as client:
        card = await told(client)
        health = card.health
        assert health is not None
        assert health.engine_bytes > 1 << 24
        assert health.front_bytes == pytest.approx(system.memory_bytes("w1"), rel=0.5)
        assert health.uptime_s >= health.engine_uptime_s > 0
        [host] = health.devices
        assert (host.name, host.kind) == ("host", "cpu")
        assert host.layers
        assert 0 < host.free_bytes < host.total_bytes
        status: dict[str, Any] = json.loads(await asyncio.to_thread(page, system, "/status"))
        assert (status["ready"], status["reason"], status["pid"]) == (True, "", system.pid("w1"))
        [worker] = status["workers"]
        assert (worker["worker_id"], worker["model"], worker["state"]) == ("w1", "demo", "ready")
        assert worker["load"]["free_blocks"] > 0
        assert worker["health"]["devices"][0]["name"] == "host"
        metrics = (await asyncio.to_thread(page, system, "/metrics")).decode()
        for name in ("device_memory_bytes", "resident_bytes", "uptime_seconds", "logits"):
            assert f"tokenbus_worker_{name}{{" in metrics


async def test_a_request_s_first_line_has_its_sampling_values_and_what_memory_is_free(system: System) -> None:
    async with await WireClient.connect(system.url) as client:
        await told(client)
        asked = {"temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["unmistakable"], "presence_penalty": 1.0}
        await answer_of(client.generate("demo", id="r", prompt="unmistakable", max_tokens=2, **asked))
    [line] = [line for line in system.log("w1") if line["event"] == "request_started"]
    sampling = line["sampling"]
    assert isinstance(sampling, dict)
    assert {name: sampling[name] for name in ("temperature", "top_k", "seed", "presence_penalty", "stop_strings")} == {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "presence_penalty": 1.0,
        "stop_strings": 1,
    }
    assert "frequency_penalty" not in sampling
    assert isinstance(line["free_blocks"], int)
    assert isinstance(line["free_mib"], dict)
    assert line["free_mib"]["host"] > 0
    assert "unmistakable" not in system.text_log("w1")


async def test_a_prompt_that_takes_long_leaves_lines_and_one_that_does_not_leaves_none(system: System) -> None:
    system.worker("slow", "--engine", "sim", "--sim-speedup", "0.5", model="cpu-0.5b-q8_0", served_name="slow")
    async with await WireClient.connect(system.url) as client:
        await told(client)
        await system.until_logged("slow", "engine_ready")
        async with asyncio.timeout(60):
            while "slow" not in {one.model for one in (await client.models()).models}:
                await asyncio.sleep(0.1)
        await answer_of(client.generate("slow", id="long", token_ids=[1 + n % 200 for n in range(1_500)], max_tokens=1))
        await answer_of(client.generate("slow", id="short", token_ids=[1, 2, 3], max_tokens=1))
    lines = [line for line in system.log("slow") if line["event"] == "prompt_computing"]
    assert {line["request_id"] for line in lines} == {"default:long"}
    done = [int(str(line["computed_tokens"])) for line in lines]
    assert done == sorted(done)
    assert done[-1] == 1_500
    assert 2 <= len(lines) <= 6
    assert all(float(str(line["tokens_per_s"])) > 0 for line in lines)
