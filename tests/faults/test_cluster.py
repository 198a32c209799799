"""A cluster of brokers loses members, and those who were connected to them go on at the others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.exact_client import ask, until_idle, until_ready
from tests.support.raw_client import Answer, RawClient, check_stream
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

NUM_TOKENS = 200
"""2 s of the simulated worker."""
SIMULATED = ("--engine", "sim", "--sim-speedup", "5")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await Cluster.start(tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture
async def system(cluster: Cluster, tmp_path: Path) -> AsyncIterator[System]:
    """A router and a worker at each of two servers."""
    system = System(cluster["a"], tmp_path)
    for name in "ab":
        system.router(f"router-{name}", "--policy", "round_robin", "--nats", cluster[name].url)
        system.worker(f"worker-{name}", "--nats", cluster[name].url, *SIMULATED, model="steps-of-50ms")
    yield system
    await system.stop()


async def streams_through(event: Callable[[], None], bare: RawClient, clients: list[WireClient]) -> list[Answer]:
    """Lets something happen to running streams; returns those of a plain client, when those of the library, which must
    not notice, have ended."""
    request = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    plain = [await bare.generate(request) for _ in range(4)]
    exact = [ask(client, NUM_TOKENS) for client in clients for _ in range(2)]
    await asyncio.gather(*(one.speaks() for one in exact))
    event()
    for one in await asyncio.gather(*(one.end() for one in exact)):
        one.check()
        assert one.is_whole, one.terminal
    await asyncio.gather(*(answer.terminal() for answer in plain))
    return plain


async def test_streams_go_on_when_one_server_sends_its_clients_away_and_another_is_killed(
    cluster: Cluster, system: System
) -> None:
    bare = await RawClient.connect(cluster["c"].url)
    await until_ready(bare, 2)
    clients = [await WireClient.connect(cluster[name].url) for name in "abc"]
    for answer in await streams_through(lambda: cluster.send_away("a"), bare, clients):
        check_stream(answer)
        assert answer.num_tokens == NUM_TOKENS
    assert {"nats_reconnected"} <= {line["event"] for line in system.log("worker-a")}
    for answer in await streams_through(cluster["b"].kill, bare, clients):
        missing, repeated = answer.flaws
        assert missing <= 5, "no more than what the server had not passed on"
        assert (repeated, len(answer.terminals)) == (0, 1)
    await until_ready(bare, 2)
    await until_idle(bare)
    for client in clients:
        await client.close()
    await bare.close()


async def test_a_router_at_another_server_learns_from_the_brokers_that_a_worker_is_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    system = System(cluster["a"], tmp_path)
    system.router("router", "--nats", cluster["b"].url)
    for name in ("worker-1", "worker-2"):
        system.worker(name, "--nats", cluster["a"].url, *SIMULATED, model="steps-of-50ms")
    try:
        bare = await RawClient.connect(cluster["c"].url)
        await until_ready(bare, 2)
        request = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answers = [await bare.generate(request) for _ in range(4)]
        await asyncio.gather(*(answer.until(3) for answer in answers))
        system.kill("worker-1")
        for answer in answers:
            await answer.terminal()
            check_stream(answer)
            assert answer.num_tokens == NUM_TOKENS
        (lost,) = system.logged("router", "worker_lost")
        assert (lost["worker_id"], lost["reason"]) == ("worker-1", "disconnected")
        await bare.close()
    finally:
        await system.stop()
