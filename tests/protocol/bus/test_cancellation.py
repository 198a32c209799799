"""A cancellation never gets lost in nats-py, whenever it comes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.scale import times
from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.bus.connection import BusSettings, connect
from tokenbus.protocol.bus.reply_inbox import ReplyInbox

SUBJECT = "test.subject"
MOST_TURNS = 10_000


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    running = await nats_server.start(0, tmp_path / "nats-server.log")
    yield running.url
    running.kill()


async def cancelled_after(turns: int, work: Coroutine[Any, Any, object]) -> bool:
    """Cancels `work` after so many turns of the loop; False if it was done by then. Raises AssertionError where the
    cancel was lost."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not task.cancel():
        task.result()
        return False
    await asyncio.wait([task])
    assert task.cancelled(), f"a cancel after {turns} turns was lost"
    return True


async def cancelled_at_every_turn(
    make: Callable[[], Coroutine[Any, Any, object]], done: Callable[[], Awaitable[object]]
) -> None:
    for _ in range(times(3, 30)):
        for turns in range(MOST_TURNS):
            if not await cancelled_after(turns, make()):
                await done()
                break


async def test_a_cancel_while_a_connection_is_being_made_is_never_lost(url: str) -> None:
    opened = []

    async def open_one() -> None:
        opened.append(await connect(BusSettings(url=url), "cancelled"))

    async def close() -> None:
        await opened.pop().close()

    await cancelled_at_every_turn(open_one, close)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancel_while_a_request_waits_for_its_reply_is_never_lost(url: str) -> None:
    connection = await connect(BusSettings(url=url), "cancelled")
    await connection.subscribe(SUBJECT, lambda message: connection.publish(message.reply, b"reply"))

    async def nothing() -> None: ...

    replies = ReplyInbox(connection, "reply.{}".format)

    async def ask() -> None:
        await replies.open()
        await replies.request(Outgoing(SUBJECT, b""), 5.0)

    await cancelled_at_every_turn(ask, nothing)
    await cancelled_at_every_turn(connection.flush, nothing)
    await connection.close()
