"""A link between two sites goes down under streams, and comes back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.exact_client import ask, until_ready
from tests.support.link import Link, opened
from tests.support.raw_client import RawClient, check_stream
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

NUM_TOKENS = 300
"""3 s of the simulated worker."""
DOWN_S = 1.8


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[tuple[Link, System]]:
    """A router at a hub and two workers at a leaf node, with a link between them."""
    cluster = Cluster(tmp_path)
    port = await cluster.add_hub()
    async with opened(port) as link:
        await cluster.add_leaf("leaf", link.port)
        system = System(cluster["hub"], tmp_path)
        system.router("router", "--policy", "round_robin")
        for name in "ab":
            nats = ("--nats", cluster["leaf"].url)
            system.worker(name, *nats, "--engine", "sim", "--sim-speedup", "5", model="steps-of-50ms")
        yield link, system
        await system.stop()
    cluster.stop()


async def test_streams_are_held_while_a_link_is_down_and_flow_again_without_a_gap(link: tuple[Link, System]) -> None:
    way, system = link
    bare, library = await RawClient.connect(system.url), await WireClient.connect(system.url)
    await until_ready(bare, 2)
    request = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    plain = [await bare.generate(request) for _ in range(4)]
    whole = [await bare.generate(request | {"stream": False}) for _ in range(2)]
    exact = [ask(library, NUM_TOKENS) for _ in range(4)]
    await asyncio.gather(*(one.speaks() for one in exact), *(answer.until(3) for answer in plain))
    way.cut()
    await asyncio.sleep(DOWN_S)
    way.restore()
    for one in await asyncio.gather(*(one.end() for one in exact)):
        one.check()
        assert one.is_whole, one.terminal
    for answer in plain + whole:
        assert (await answer.terminal())["finish_reason"] == "length"
        missing, repeated = answer.flaws
        assert missing <= 5, "no more than what was in flight"
        assert (repeated, len(answer.terminals)) == (0, 1)
    for answer in whole:
        check_stream(answer)
    assert "link_suspected" in {line["event"] for name in "ab" for line in system.log(name)}
    assert not [line for name in "ab" for line in system.log(name) if line["event"] == "client_gone"]
    await library.close()
    await bare.close()
