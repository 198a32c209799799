"""SIGHUP changes settings while requests are served."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.support.exact_client import until_ready
from tests.support.system import System, running_gateway
from tokenbus.client.wire.wire_client import WireClient


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def read_again(system: System, name: str) -> dict[str, object]:
    """Sends SIGHUP and returns the log line about the result."""
    events = ("settings_reloaded", "settings_refused")
    before = sum(line["event"] in events for line in system.log(name))
    system.signal(name, signal.SIGHUP)
    async with asyncio.timeout(60):
        while len(said := [line for line in system.log(name) if line["event"] in events]) == before:
            await asyncio.sleep(0.02)
    return said[-1]


async def test_limits_of_a_router_and_a_worker_change_without_a_restart(system: System, tmp_path: Path) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text('[router]\ntenant-limit = "0,1,0"\n[worker]\nmax-new-tokens = 4\n')
    system.router("router", "--config", str(file))
    system.worker("w1", "--config", str(file))
    await until_ready(await system.connect(), 1)
    async with await WireClient.connect(system.url) as client:

        async def ask() -> str:
            chunks = [chunk async for chunk in client.generate("demo", prompt="Once", ignore_eos=True)]
            last = chunks[-1]
            return str(last.error.code) if last.error else str(last.usage.completion_tokens)

        assert [await ask(), await ask()] == ["4", "overloaded"]

        file.write_text('[router]\ntenant-limit = "0,0,0"\n[worker]\nmax-new-tokens = 6\nmax-waiting = 1\n')
        assert (await read_again(system, "router"))["changed"] == ["tenant-limit"]
        assert (await read_again(system, "w1"))["changed"] == ["max-new-tokens", "max-waiting"]
        assert [await ask(), await ask()] == ["6", "6"]

        file.write_text('[router]\npolicy = "nobody"\ntenant-limit = "0,1,0"\n')
        refused = await read_again(system, "router")
        assert refused["event"] == "settings_refused"
        assert "--policy must be one of kv" in str(refused["error"])
        assert [await ask(), await ask()] == ["6", "6"]


async def test_keys_of_a_gateway_change_without_a_restart(system: System, tmp_path: Path) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text('[gateway]\napi-key = ["old=acme"]\n')
    system.router("router")
    system.worker("w1")
    await until_ready(await system.connect(), 1)
    with running_gateway(system.url, tmp_path, "--config", str(file)) as gateway:
        async with httpx2.AsyncClient(timeout=60) as http:

            async def ask(key: str) -> int:
                asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
                headers = {"Authorization": f"Bearer {key}"}
                return (await http.post(f"{gateway.url}/chat/completions", json=asked, headers=headers)).status_code

            assert [await ask("old"), await ask("new")] == [200, 401]
            file.write_text('[gateway]\napi-key = ["new=other"]\n')
            os.kill(gateway.process.pid, signal.SIGHUP)
            async with asyncio.timeout(60):
                while not gateway.log("settings_reloaded"):
                    await asyncio.sleep(0.02)
            assert [await ask("old"), await ask("new")] == [401, 200]
    assert "new=other" not in gateway.text_log()
