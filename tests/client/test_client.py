"""A client's requests, and those of other tenants over the same connection."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.raw_client import PREFIX, RawClient
from tokenbus.cli import nats_server
from tokenbus.client import Client


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A broker where nobody serves anything."""
    nats = await nats_server.start(0, tmp_path / "nats.log")
    yield nats.url
    nats.stop()


@pytest.mark.parametrize("model", ["", "x" * 129])
async def test_a_model_that_can_be_no_name_is_refused_and_leaves_nothing_behind(url: str, model: str) -> None:
    async with await Client.connect(url) as client:
        with pytest.raises(ValueError, match="a name must have 1 to 128 bytes"):
            client.generate(model, prompt="hi")
        assert "0 streams" in repr(client)


async def test_another_tenant_speaks_over_the_same_connection_and_ends_with_it(url: str) -> None:
    heard = asyncio.Queue[str]()
    bare = await RawClient.connect(url)
    for tail in ("generate.demo", "generate.demo.acme", "cancel.*", "cancel.acme.*"):

        async def hear(message: object, tail: str = tail) -> None:
            heard.put_nowait(tail)

        await bare.nats.subscribe(f"{PREFIX}.{tail}", cb=hear)
    await bare.nats.flush()
    async with asyncio.timeout(60):
        async with await Client.connect(url) as client:
            acme = await client.for_tenant("acme")
            client.generate("demo", prompt="hi")
            acme.generate("demo", prompt="hi")
            assert {await heard.get(), await heard.get()} == {"generate.demo", "generate.demo.acme"}
        assert {await heard.get(), await heard.get()} == {"cancel.*", "cancel.acme.*"}
    await bare.close()
