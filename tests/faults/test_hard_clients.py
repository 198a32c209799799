"""Misbehaving clients are kept within bounds, and no other client notices them."""

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import Process

import pytest

from tests.support.exact_client import ExactStream, ask, until_idle, until_ready
from tests.support.raw_client import PREFIX, Answer
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import connection as nats

_READER = """
import asyncio, sys
from tokenbus import Client

async def main(url, count, max_tokens):
    async with Client(url) as client:
        async def read():
            fields = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0}
            async for chunk in client.generate("demo", max_tokens=max_tokens, **fields):
                print(chunk.tokens, flush=True)
        await asyncio.gather(*(read() for _ in range(count)))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def simulated(system: System) -> None:
    """Starts a worker whose streams take 10 ms per token, however many there are."""
    system.worker("worker", "--engine", "sim", "--sim-speedup", "5", model="steps-of-50ms")


async def reader(url: str, count: int, max_tokens: int) -> Process:
    """Starts a client process with `count` streams, all of which have sent tokens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _READER, url, str(count), str(max_tokens), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for _ in range(3 * count):
            await process.stdout.readline()
    return process


@pytest.mark.long
async def test_a_client_killed_with_9_frees_its_lanes(system: System) -> None:
    system.router("router")
    simulated(system)
    bare = await system.connect()
    await until_ready(bare, 1)
    client = await reader(system.url, 32, 3_000)
    client.kill()
    await client.wait()
    await until_idle(bare)
    assert len([line for line in system.log("worker") if line["event"] == "client_gone"]) == 32


async def test_a_client_that_reconnects_keeps_its_streams(system: System) -> None:
    system.router("router")
    simulated(system)
    bare = await system.connect()
    await until_ready(bare, 1)
    connection = await nats.connect(nats.BusSettings(url=system.url), name="reconnecting")
    async with await WireClient.from_connection(connection) as client:
        undisturbed = await ask(client, 250).end()
        told = [ask(client, 250) for _ in range(8)]
        await asyncio.gather(*(one.speaks() for one in told))
        for _ in range(3):
            connection.abort()
            await asyncio.gather(*(one.speaks_on() for one in told))
        for one in await asyncio.gather(*(one.end() for one in told)):
            one.check(undisturbed)
            assert one.is_whole


@pytest.mark.long
async def test_a_client_that_stops_reading_disturbs_nobody(system: System) -> None:
    system.router("router")
    simulated(system)
    bare = await system.connect()
    await until_ready(bare, 1)
    stopped = await reader(system.url, 8, 400)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        async with await WireClient.connect(system.url) as client:
            for one in [ask(client, 300) for _ in range(4)]:
                (await one.end()).check()
                assert one.is_whole
        await until_idle(bare, 60)
    finally:
        stopped.kill()
        await stopped.wait()


@pytest.mark.long
async def test_cancels_and_resyncs_for_nothing_and_ids_used_again_are_bounded_and_harm_nobody(system: System) -> None:
    system.router("router")
    system.worker("worker-a")
    system.worker("worker-b")
    bare = await system.connect()
    await until_ready(bare, 2)
    before = {name: len(system.log(name)) for name in ("router", "worker-a", "worker-b")}
    memory = {name: system.memory_bytes(name) for name in before}
    async with await WireClient.connect(system.url) as client:
        calm = ask(client, 600)
        await calm.speaks()
        inbox = bare.nats.new_inbox()
        for number in range(20_000):
            await bare.nats.publish(f"{PREFIX}.cancel.{secrets.token_hex(40)}", b"")
            await bare.nats.publish(f"{PREFIX}.resync.r{number}", b'{"offset": 0}', reply=inbox)
        await bare.nats.flush(30)
        (await calm.end()).check()
        assert calm.is_whole
        for name, lines in before.items():
            assert len(system.log(name)) - lines < 20, name
            assert system.memory_bytes(name) - memory[name] < 64 * 1024 * 1024, name
        last = await ask(client, 5).end()
        assert last.is_whole, last.terminal


async def test_a_resync_in_a_loop_is_answered_and_repeats_at_most_five_times_a_second(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    answer = await bare.generate({"id": "loop", "prompt": "x", "max_tokens": 5, "ignore_eos": True})
    await answer.terminal()
    told = len(answer.messages)
    began = time.monotonic()
    for _ in range(500):
        reply = await bare.nats.request(f"{PREFIX}.resync.loop", b'{"offset": 0}', timeout=60)
        assert json.loads(reply.data) == {"found": True}
    took = time.monotonic() - began
    repeated = sum(message["finish_reason"] is not None for message in answer.messages[told:])
    assert 1 <= repeated <= took / 0.2 + 1
    assert len([line for line in system.log("worker") if line["event"] == "stream_replayed"]) == 1


async def test_an_id_used_again_and_again_is_answered_each_time_by_a_router_that_has_just_come(system: System) -> None:
    system.router("router")
    system.worker("worker-a")
    system.worker("worker-b")
    bare = await system.connect()
    await until_ready(bare, 2)
    system.signal("router", signal.SIGKILL)
    await system.wait("router")
    system.router("late")
    await until_ready(bare, 2)
    for number in range(30):
        answer: Answer = await bare.ask({"id": "again", "prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})
        assert answer.text == " 42", (number, answer.messages[-1].get("error"), answer.messages[-1])
        await bare.nats.publish(f"{PREFIX}.cancel.again", b"")


@pytest.mark.long
async def test_a_client_that_reconnects_every_second_only_harms_itself(system: System) -> None:
    system.router("router")
    simulated(system)
    bare = await system.connect()
    await until_ready(bare, 1)
    connection = await nats.connect(nats.BusSettings(url=system.url), name="restless")
    async with (
        await WireClient.connect(system.url) as calm_client,
        await WireClient.from_connection(connection) as restless,
    ):
        calm = [ask(calm_client, 500) for _ in range(4)]
        told: list[ExactStream] = []
        for _ in range(4):
            told.append(ask(restless, 200))
            await asyncio.sleep(1.0)
            connection.abort()
        for one in await asyncio.gather(*(one.end() for one in calm + told)):
            one.check()
        assert all(one.is_whole for one in calm)
    await until_idle(bare)
