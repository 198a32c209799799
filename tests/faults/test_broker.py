"""When the broker stands still, clients see every byte."""

import asyncio

import pytest

from tests.support.exact_client import ask, until_idle, until_ready
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient


@pytest.mark.long
async def test_a_broker_that_stands_still_for_three_seconds_ends_no_stream_of_the_library(system: System) -> None:
    system.router("router")
    system.worker("worker-a")
    system.worker("worker-b")
    bare = await system.connect()
    await until_ready(bare, 2)
    async with await WireClient.connect(system.url) as client:
        undisturbed = await ask(client, 600, logprobs=5).end()
        told = [ask(client, 600) for _ in range(8)]
        await asyncio.gather(*(one.speaks() for one in told))
        with system.broker_frozen():
            await asyncio.sleep(3)
        for one in await asyncio.gather(*(one.end() for one in told)):
            one.check(undisturbed)
        assert all(one.is_whole for one in told)
        fresh = await system.connect()
        await until_ready(fresh, 2)
        await until_idle(fresh)
        (await ask(client, 20).end()).check(undisturbed)
