"""Routers that die while large requests come to them in parts lose none of them."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.errors import NoRespondersError

from tests.support.exact_client import until_ready
from tests.support.in_part import in_part
from tests.support.raw_client import PREFIX
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

SIM = ("--engine", "sim", "--sim-speedup", "1000")
PADDING = {"padding": "z" * 4_000_000}
"""More than 60 parts, of which a short prompt is left."""


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 64KB\n")
    system = await System.start(tmp_path, config)
    yield system
    await system.stop()


@pytest.mark.parametrize("how", in_part([signal.SIGKILL, signal.SIGTERM], 2))
async def test_requests_on_their_way_to_a_router_that_ends_reach_another_one(
    system: System, how: signal.Signals
) -> None:
    for name in ("router-a", "router-b"):
        system.router(name)
    system.worker("worker", *SIM, model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 1)
    for name in ("router-a", "router-b"):
        await system.until_logged(name, "router_ready")
    chat = [{"role": "user", "content": "hello"}]
    async with await WireClient.connect(system.url) as client:

        async def ask(resume: bool) -> messages.Chunk:
            stream = client.generate("demo", messages=chat, chat_template_kwargs=PADDING, max_tokens=3, resume=resume)
            return [chunk async for chunk in stream][-1]

        asked = [asyncio.create_task(ask(number % 2 == 0)) for number in range(10)]
        await asyncio.sleep(0.1)
        assert not any(one.done() for one in asked)
        system.signal("router-a", how)
        async with asyncio.timeout(90):
            terminals = await asyncio.gather(*asked)
    assert [one.finish_reason for one in terminals] == [messages.FinishReason.LENGTH] * 10
    lines = [system.log(name) for name in ("router-a", "router-b")]
    before, behind = ([one for one in log if one["event"] == "request_received"] for log in lines)
    assert len(behind) == 10 - len(before) > 5


async def test_a_plain_client_learns_at_its_next_part_that_the_router_is_gone(system: System) -> None:
    system.router("router-a")
    system.worker("worker", *SIM, model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 1)
    headers = {"Tokenbus-Size": "100000"}
    answer = await bare.nats.request(f"{PREFIX}.generate.demo", b"", timeout=20, headers=headers)
    upload = answer.data.decode().split('"')[3]
    await bare.nats.request(upload, bytes(1_000), timeout=20, headers={"Tokenbus-Offset": "0"})
    system.kill("router-a")
    with pytest.raises(NoRespondersError):
        await bare.nats.request(upload, bytes(1_000), timeout=20, headers={"Tokenbus-Offset": "1000"})


async def test_a_worker_that_freezes_while_a_run_comes_in_parts_is_given_up_for_another(system: System) -> None:
    system.router("router")
    flags = (*SIM, "--context-length", "262144", "--kv-tokens", "300000")
    system.worker("frozen", *flags, model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 1)
    system.worker("worker", *flags, model="dynamo")
    await until_ready(bare, 2)
    system.signal("frozen", signal.SIGSTOP)
    try:
        async with await WireClient.connect(system.url) as client, asyncio.timeout(60):
            asked = [client.generate("demo", token_ids=[500] * 100_000, max_tokens=3) for _ in range(2)]
            for stream in asked:
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].finish_reason is messages.FinishReason.LENGTH, chunks[-1]
                assert chunks[-1].worker_id == "worker"
    finally:
        system.signal("frozen", signal.SIGCONT)
