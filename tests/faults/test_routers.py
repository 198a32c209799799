"""Any number of routers: each sees what the others place, and none is needed when it dies."""

import asyncio
import random
import signal

import pytest

from tests.support.exact_client import ask, cards, until_idle, until_ready
from tests.support.raw_client import PREFIX
from tests.support.system import System, command
from tokenbus.client.wire.wire_client import WireClient

pytestmark = pytest.mark.usefixtures("executed")
SIM = ("--engine", "sim", "--sim-speedup", "5")


@pytest.mark.long
async def test_two_of_three_routers_killed_under_200_requests_disturb_no_stream_and_the_rest_is_answered(
    system: System,
) -> None:
    names = ["router-a", "router-b", "router-c"]
    for name in names:
        system.router(name)
    for name in ("worker-a", "worker-b"):
        system.worker(name, *SIM, "--max-waiting", "256", "--max-num-seqs", "16", model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 2)
    for name in names:
        await system.until_logged(name, "router_ready")
    rng = random.Random(3)
    rng.shuffle(names)
    async with await WireClient.connect(system.url) as client:
        undisturbed = await ask(client, 100).end()
        told = []
        for number in range(200):
            told.append(ask(client, rng.randint(1, 100)))
            if number in (60, 130):
                system.signal(names.pop(), signal.SIGKILL)
            await asyncio.sleep(0.005)
        for one in await asyncio.gather(*(one.end() for one in told)):
            one.check(undisturbed)
            assert one.is_whole, one.terminal
        await until_idle(bare)
    (last,) = names
    lines = system.log(last)
    received = [line["request_id"] for line in lines if line["event"] == "request_received"]
    assert received
    # those that a dead router guarded, if they last until their workers have noticed
    adopted = [line["request_id"] for line in lines if line["event"] == "request_adopted"]
    system.signal(last, signal.SIGTERM)
    assert await system.wait(last) == 0
    finished = [line["request_id"] for line in system.log(last) if line["event"] == "request_finished"]
    assert sorted(map(str, finished)) == sorted(map(str, received + adopted))


async def wire_check(url: str) -> str:
    """Runs `tokenbus wire-check`, which must find no broken rule, and returns its output."""
    process = await asyncio.create_subprocess_exec(
        *command("wire-check", "--nats", url, "--model", "demo"), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode()


@pytest.mark.long
async def test_the_wire_holds_with_three_routers_under_load_and_when_one_of_them_is_left(system: System) -> None:
    names = ["router-a", "router-b", "router-c"]
    for name in names:
        system.router(name)
    system.worker("worker", "--max-waiting", "256", "--kv-tokens", "32768")
    bare = await system.connect()
    await until_ready(bare, 1)
    for name in names:
        await system.until_logged(name, "router_ready")
    async with await WireClient.connect(system.url) as client:
        told = [ask(client, 200) for _ in range(8)]
        assert " 0 broken" in await wire_check(system.url)
        for dead in ("router-c", "router-a"):
            told += [ask(client, 200) for _ in range(8)]
            system.signal(dead, signal.SIGKILL)
            for one in await asyncio.gather(*(one.end() for one in told)):
                one.check()
                assert one.is_whole
        assert " 0 broken" in await wire_check(system.url)


@pytest.mark.long
async def test_a_router_that_joins_late_knows_what_runs(system: System) -> None:
    system.router("router-a")
    system.worker("worker", *SIM, model="steps-of-50ms")
    bare = await system.connect()
    await until_ready(bare, 1)
    async with await WireClient.connect(system.url) as client:
        told = [ask(client, 400) for _ in range(12)]
        await asyncio.gather(*(one.speaks() for one in told))
        system.router("router-b")
        await system.until_logged("router-b", "snapshot_applied")
        system.signal("router-a", signal.SIGKILL)
        (card,) = await until_ready(bare, 1)
        assert card["load"]["running"] or all(one.ended_at for one in told)
        assert await client.cancel(told[-1].stream.request_id) or told[-1].ended_at
        for one in await asyncio.gather(*(one.end() for one in told)):
            assert one.terminal.finish_reason in ("length", "cancelled")
        assert await cards(bare)


async def test_a_resync_and_a_cancel_are_answered_at_once_though_the_guardian_was_just_killed(system: System) -> None:
    system.router("guardian")
    system.worker("worker", *SIM, model="steps-of-50ms")
    bare = await system.connect()
    await until_ready(bare, 1)
    live = await bare.generate({"id": "live", "token_ids": [1, 2, 3], "max_tokens": 2_000, "ignore_eos": True})
    await live.until(3)
    system.router("other")
    await system.until_logged("other", "snapshot_applied")
    system.signal("guardian", signal.SIGKILL)
    for verb, answer in (("resync", b'{"found":true}'), ("cancel", b'{"cancelled":true}')):
        reply = await bare.nats.request(f"{PREFIX}.{verb}.default.live.demo", b'{"offset": 0}', timeout=0.5)
        assert reply.data == answer
    assert (await live.terminal())["finish_reason"] == "cancelled"


async def test_of_two_fronts_with_one_name_the_earlier_leaves_and_says_so(system: System) -> None:
    system.router("router")
    system.worker("first", "--worker-id", "twin")
    bare = await system.connect()
    await until_ready(bare, 1)
    system.worker("second", "--worker-id", "twin")
    assert await system.wait("first") == 2
    assert "give each its own --worker-id" in system.text_log("first")
    await system.until_logged("second", "engine_ready")
    async with await WireClient.connect(system.url) as client:
        (await ask(client, 5).end()).check()
    await system.until_logged("second", "request_finished")
    assert "replaced" not in {line["event"] for line in system.log("second")}
