"""The client library sends a large request in parts, and once more if its router is gone in the middle."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.support.raw_client import PREFIX, RawClient
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

PROMPT = "a long prompt. " * 20_000
"""Five parts, where the broker allows 64 KiB."""
UPLOAD = f"{PREFIX}.upload.default.fake"


class FakeRouter:
    """A router that takes one large request after another, and can lose them."""

    def __init__(self, connection: RawClient) -> None:
        self.bare = connection
        self.announced: list[Msg] = []
        self.parts: list[Msg] = []
        self.part_came = asyncio.Event()
        self.refusal: dict[str, object] | None = None
        """The answer to announcements, if they are refused."""
        self.lost_uploads: set[int] = set()
        """The uploads to which nobody listens, by their numbers from 1."""
        self.unanswered_after = 1_000
        self.leaves_after = 0
        """The number of parts of the first request after which nobody listens for more; 0 is none."""
        self.requests: list[dict[str, Any]] = []

    async def open(self) -> None:
        await self.bare.nats.subscribe(f"{PREFIX}.generate.demo", cb=self.announce)
        self._listening = await self.bare.nats.subscribe(f"{UPLOAD}.open.*", cb=self.take)
        await self.bare.settle()

    async def announce(self, message: Msg) -> None:
        self.announced.append(message)
        assert message.data == b""
        if self.refusal is not None:
            await message.respond(json.dumps(self.refusal).encode())
            return
        self.parts.clear()
        if self.leaves_after and len(self.announced) == 2:
            self.leaves_after = 0
            await self.bare.nats.subscribe(f"{UPLOAD}.open.*", cb=self.take)
            await self.bare.settle()
        number = len(self.announced)
        where = "closed" if number in self.lost_uploads else "open"
        await message.respond(json.dumps({"upload": f"{UPLOAD}.{where}.{number}"}).encode())

    async def take(self, message: Msg) -> None:
        self.parts.append(message)
        self.part_came.set()
        if len(self.parts) > self.unanswered_after or not message.data:
            return
        sizes = [len(part.data) for part in self.parts]
        assert message.headers is not None
        assert int(message.headers["Tokenbus-Offset"]) == sum(sizes[:-1])
        announced = self.announced[-1].headers
        assert announced is not None
        answer = json.dumps({"upload": message.subject, "received": sum(sizes)}).encode()
        if len(self.parts) == self.leaves_after:
            self._leaving = asyncio.create_task(self._leave(message, answer))  # which would end this callback
            return
        if sum(sizes) < int(announced["Tokenbus-Size"]):
            await message.respond(answer)
            return
        request = json.loads(b"".join(part.data for part in self.parts))
        self.requests.append(request)
        await message.respond(json.dumps({"id": request["id"], "attempt": 1, "finish_reason": "stop"}).encode())

    async def _leave(self, message: Msg, answer: bytes) -> None:
        await self._listening.unsubscribe()
        await self.bare.settle()
        await message.respond(answer)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    (tmp_path / "nats.conf").write_text("max_payload: 64KB\n")
    nats = await nats_server.start(0, tmp_path / "nats.log", tmp_path / "nats.conf")
    yield nats.url
    nats.stop()


@pytest.fixture
async def router(url: str) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(await RawClient.connect(url))
    await router.open()
    yield router
    await router.bare.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[WireClient]:
    async with asyncio.timeout(60), await WireClient.connect(url) as client:
        yield client


async def end(client: WireClient, **fields: object) -> messages.Chunk:
    chunks = [chunk async for chunk in client.generate("demo", prompt=PROMPT, **fields)]
    assert client.num_streams == 0
    return chunks[-1]


def code_of(terminal: messages.Chunk) -> errors.Code:
    assert terminal.error
    return terminal.error.code


async def test_a_large_request_comes_in_parts_as_large_as_the_broker_allows(
    router: FakeRouter, client: WireClient
) -> None:
    assert (await end(client)).finish_reason is messages.FinishReason.STOP
    assert [request["prompt"] for request in router.requests] == [PROMPT]
    assert [len(part.data) for part in router.parts[:-1]] == [61_440] * 4


async def test_a_router_that_is_gone_after_its_answer_loses_nothing(router: FakeRouter, client: WireClient) -> None:
    router.lost_uploads = {1, 2}
    assert (await end(client)).finish_reason is messages.FinishReason.STOP
    assert len(router.announced) == 3
    assert [request["prompt"] for request in router.requests] == [PROMPT]


async def test_a_router_that_is_gone_before_the_last_part_loses_nothing(router: FakeRouter, client: WireClient) -> None:
    router.leaves_after = 4
    assert (await end(client)).finish_reason is messages.FinishReason.STOP
    assert len(router.announced) == 2
    assert [request["prompt"] for request in router.requests] == [PROMPT]


async def test_a_client_gives_up_when_every_router_is_gone_in_the_middle(
    router: FakeRouter, client: WireClient
) -> None:
    router.lost_uploads = set(range(1, 10))
    terminal = await end(client)
    assert code_of(terminal) is errors.Code.UPLOAD_LOST
    assert terminal.error
    assert terminal.error.retryable
    assert len(router.announced) == 4


async def test_an_upload_that_its_router_has_forgotten_is_sent_again(router: FakeRouter, client: WireClient) -> None:
    lost = {"id": "", "finish_reason": "error", "error": {"code": "upload_lost", "message": "", "retryable": True}}

    async def forget(message: Msg) -> None:
        await message.respond(json.dumps(lost).encode())

    router.lost_uploads = {1}
    await router.bare.nats.subscribe(f"{UPLOAD}.closed.1", cb=forget)
    await router.bare.settle()
    assert (await end(client)).finish_reason is messages.FinishReason.STOP
    assert len(router.announced) == 2


@pytest.mark.parametrize("code", [errors.Code.OVERLOADED, errors.Code.PAYLOAD_TOO_LARGE, errors.Code.SHUTTING_DOWN])
async def test_a_refusal_ends_the_stream_with_its_error(
    router: FakeRouter, client: WireClient, code: errors.Code
) -> None:
    error = {"code": code, "message": "no", "retryable": errors.CODES[code].retryable}
    router.refusal = {"id": "", "finish_reason": "error", "error": error}
    assert code_of(await end(client)) is code
    assert len(router.announced) == 1


async def test_a_router_that_knows_no_announcements_finds_the_request_too_large(
    router: FakeRouter, client: WireClient
) -> None:
    error = {"code": "invalid_request", "message": "the message is not valid JSON", "retryable": False}
    router.refusal = {"id": "", "finish_reason": "error", "error": error}
    assert code_of(await end(client)) is errors.Code.PAYLOAD_TOO_LARGE


async def test_a_cancel_while_parts_are_sent_ends_the_stream_and_gives_the_upload_up(
    router: FakeRouter, client: WireClient
) -> None:
    router.unanswered_after = 2
    stream = client.generate("demo", prompt=PROMPT)
    while len(router.parts) < 3:
        router.part_came.clear()
        await router.part_came.wait()
    stream.cancel()
    assert [chunk.finish_reason async for chunk in stream] == [messages.FinishReason.CANCELLED]
    while len(router.parts) < 4:
        router.part_came.clear()
        await router.part_came.wait()
    assert router.parts[-1].data == b""
    assert router.requests == []


async def test_a_client_that_is_closed_while_parts_are_sent_gives_the_upload_up(
    router: FakeRouter, client: WireClient
) -> None:
    router.unanswered_after = 1
    client.generate("demo", prompt=PROMPT)
    while len(router.parts) < 2:
        router.part_came.clear()
        await router.part_came.wait()
    await client.close()
    while len(router.parts) < 3:
        router.part_came.clear()
        await router.part_came.wait()
    assert router.parts[-1].data == b""
