"""After a restart of the broker, a request waits a while for the routers, which have to come back too."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from nats.aio.msg import Msg

from tests.client.test_chunk_stream import CANCELLED, STOP, FakeTransport, chunk, code_of
from tests.support.raw_client import PREFIX, RawClient
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, errors, messages

LARGE = "x" * 2_000_000


class Place:
    """A broker without routers that has just been restarted, and a client that is connected to it again."""

    def __init__(self, url: str, client: WireClient) -> None:
        self.url = url
        self.client = client

    async def unheard(self, **fields: object) -> asyncio.Task[list[messages.Chunk]]:
        """Reads the stream of a request after which the broker has said that no router listens."""
        stream = self.client.generate("demo", **fields)
        reading = asyncio.create_task(_read(stream))
        with pytest.raises(errors.RequestError, match="no router listens"):
            await self.client.models()
        assert not reading.done()
        return reading


async def _read(stream: AsyncIterator[messages.Chunk]) -> list[messages.Chunk]:
    return [chunk async for chunk in stream]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    async with asyncio.timeout(60), await WireClient.connect(nats.url) as client:
        nats.kill()
        nats = await nats_server.start(urlsplit(nats.url).port or 0, tmp_path / "nats.log")
        try:
            yield Place(nats.url, client)
        finally:
            nats.stop()


async def test_a_client_without_its_broker_closes_soon(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    async with asyncio.timeout(5), await WireClient.connect(nats.url):
        nats.kill()


async def test_a_request_that_came_before_the_routers_is_sent_again_until_one_listens(place: Place) -> None:
    reading = await place.unheard(prompt="hi", id="mine")
    asked = []

    async def answer(message: Msg) -> None:
        asked.append(codec.Decoder(messages.GenerateRequest).decode(message.data, codec.Encoding.JSON))
        terminal = messages.Chunk(id="mine", worker_id="w", model="demo", created=1, finish_reason=STOP)
        await message.respond(codec.encode(terminal, codec.Encoding.JSON))

    router = await RawClient.connect(place.url)
    await router.nats.subscribe(f"{PREFIX}.generate.demo", cb=answer)
    (terminal,) = await reading
    assert terminal.finish_reason is STOP
    assert [request.id for request in asked] == ["mine"]
    await router.close()


@pytest.mark.parametrize("prompt", ["hi", LARGE], ids=["small", "in parts"])
async def test_if_none_comes_the_request_ends_in_no_worker_after_its_time(place: Place, prompt: str) -> None:
    (terminal,) = await (await place.unheard(prompt=prompt, timeout_ms=1_000.0))
    assert code_of(terminal) in (errors.Code.NO_WORKER, errors.Code.DEADLINE_EXCEEDED)


def test_it_is_sent_again_with_the_time_that_is_left() -> None:
    line = FakeTransport(timeout_ms=1_000.0)
    line.stream.submit()
    line.stream.submit_soon(line.now)
    line.wait(0.1)
    assert [request.timeout_ms for request in line.resubmitted] == [1_000.0]
    line.wait(0.3)
    _, again = line.resubmitted
    assert again.id == "r"
    assert again.timeout_ms is not None
    assert 600 < again.timeout_ms < 850


async def test_it_ends_when_no_time_is_left() -> None:
    line = FakeTransport(timeout_ms=1_000.0)
    line.stream.submit_soon(0.9)
    line.wait(1.2)
    (terminal,) = await line.rest()
    assert code_of(terminal) is errors.Code.DEADLINE_EXCEEDED
    assert line.resubmitted == []


async def test_one_that_nobody_has_is_cancelled_at_once() -> None:
    line = FakeTransport()
    line.stream.submit_soon(0.0)
    line.stream.cancel()
    line.wait(1.0)
    (terminal,) = await line.rest()
    assert terminal.finish_reason is CANCELLED
    assert line.resubmitted == []


async def test_one_that_was_cancelled_before_the_news_came_is_not_sent_again() -> None:
    line = FakeTransport()
    line.stream.cancel()
    line.stream.submit_soon(0.0)
    line.wait(1.0)
    (terminal,) = await line.rest()
    assert terminal.finish_reason is CANCELLED
    assert line.resubmitted == []


async def test_silence_counts_from_the_last_time_that_it_was_sent() -> None:
    line = FakeTransport()
    for _ in range(40):
        line.stream.submit_soon(line.now)
        line.wait(line.now + 0.25)
    assert line.resyncs == []
    line.feed(chunk(0, "a", finish_reason=STOP))
    assert [one.finish_reason for one in await line.rest()] == [STOP]
