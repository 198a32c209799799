"""One stream's error does not keep the others from being looked after."""

import asyncio
import functools
import time

import pytest
from nats.aio.subscription import Subscription

from tests.support.recording_bus import RecordingBus
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.inbox import Inbox
from tokenbus.protocol.wire import codec, errors, messages, subjects


class Bus(RecordingBus):
    """A bus with an inbox in which nothing arrives."""

    def new_inbox(self) -> str:
        return "_INBOX.test"

    async def subscribe(self, subject: str, callback: object) -> Subscription | None:
        return None


class FaultyStream(ChunkStream):
    """A stream whose clock is broken."""

    def tick(self, now: float, pause_s: float = 0.0) -> None:
        raise KeyError("a bug")


SUBJECT = subjects.Subjects().generate("demo")


async def test_a_stream_that_fails_ends_and_the_others_still_ask_for_what_is_missing() -> None:
    bus = Bus()
    inbox = Inbox(bus, subjects.Subjects(), "default", codec.Encoding.JSON)  # type: ignore[arg-type]
    await inbox.open()
    began = asyncio.get_running_loop().time() - 60  # long ago, so that silence counts at once
    faulty, other = (
        kind(messages.GenerateRequest(id=name, prompt="hi"), codec.Encoding.JSON, inbox, began, subject=SUBJECT)
        for kind, name in ((FaultyStream, "faulty"), (ChunkStream, "other"))
    )
    for stream in (faulty, other):
        inbox.submit(stream, messages.GenerateRequest(id=stream.request_id, prompt="hi"))
    async with asyncio.timeout(10):
        chunks = [chunk async for chunk in faulty]
        while not any("resync.default.other.demo" in message.subject for message in bus.take()):
            await asyncio.sleep(0.01)
    assert [chunk.error.code for chunk in chunks if chunk.error] == [errors.Code.INTERNAL]
    await inbox.close()


async def test_an_inbox_without_streams_does_not_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, ticks = Bus(), list[float]()
    inbox = Inbox(bus, subjects.Subjects(), "default", codec.Encoding.JSON)  # type: ignore[arg-type]
    ticked = asyncio.Event()

    async def tick(seconds: float) -> None:
        ticks.append(seconds)
        ticked.set()
        await turn()

    turn = functools.partial(asyncio.sleep, 0)
    monkeypatch.setattr("tokenbus.client.wire.inbox.asyncio.sleep", tick)
    await inbox.open()
    for _ in range(10):
        await turn()
    assert ticks == []
    for name in ("one", "two"):
        stream = ChunkStream(
            messages.GenerateRequest(id=name, prompt="hi"),
            codec.Encoding.JSON,
            inbox,
            time.monotonic(),
            subject=SUBJECT,
        )
        inbox.submit(stream, messages.GenerateRequest(id=name, prompt="hi"))
        await ticked.wait()
        inbox.forget(stream)
        for _ in range(10):
            await turn()
        ticks.clear()
        ticked.clear()
        for _ in range(10):
            await turn()
        assert ticks == []
    await inbox.close()
