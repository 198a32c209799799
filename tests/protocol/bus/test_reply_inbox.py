"""Each request gets its own reply, or the reason why there is none."""

import asyncio

import pytest
from nats.aio.msg import Msg

from tests.protocol.bus.harness import PATIENCE_S, SUBJECT, Connect, Inbox, Server, back, outage, works
from tokenbus.protocol.bus.bus import NoRespondersError, Outgoing, PayloadTooLargeError
from tokenbus.protocol.bus.connection import Connection
from tokenbus.protocol.bus.reply_inbox import ReplyInbox


async def opened(connection: Connection) -> ReplyInbox:
    inbox = connection.new_inbox()
    replies = ReplyInbox(connection, lambda token: f"{inbox}.{token}")
    await replies.open()
    return replies


def question(payload: bytes = b"anyone?", **headers: str) -> Outgoing:
    return Outgoing(SUBJECT, payload, headers=headers or None)


async def test_each_request_gets_its_own_reply(connected: Connect) -> None:
    asking, answering = await connected(), await connected()

    def answer(message: Msg) -> None:
        answering.publish(message.reply, b"re: " + message.data)
        answering.publish(message.reply, b"once more")

    await answering.subscribe(SUBJECT, answer)
    await answering.flush()
    replies = await opened(asking)
    async with asyncio.timeout(PATIENCE_S):
        got = await asyncio.gather(*(replies.request(question(b"%d" % number), PATIENCE_S) for number in range(50)))
    assert [reply.data for reply in got] == [b"re: %d" % number for number in range(50)]
    assert repr(replies) == "<ReplyInbox of 0 requests>"


async def test_a_request_that_nobody_listens_to_fails_at_once(connected: Connect) -> None:
    connection = await connected()
    replies = await opened(connection)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoRespondersError, match=SUBJECT):
            await replies.request(question(), 10 * PATIENCE_S)


async def test_a_request_that_nobody_answers_times_out_and_is_forgotten(connected: Connect) -> None:
    connection = await connected()
    heard, replies = Inbox(), await opened(connection)
    await connection.subscribe(SUBJECT, heard)
    with pytest.raises(TimeoutError, match=SUBJECT):
        await replies.request(question(), 0.05)
    await heard.until(1)
    assert repr(replies) == "<ReplyInbox of 0 requests>"
    connection.publish(heard.messages[0].reply, b"too late")
    await works(connection)


async def test_a_request_while_the_broker_is_away_times_out(server: Server, connected: Connect) -> None:
    connection = await connected()
    replies = await opened(connection)
    await outage(server, connection)
    with pytest.raises(TimeoutError):
        await replies.request(question(), 0.05)
    await back(server, connection)
    await works(connection)


async def test_a_request_that_can_not_be_sent_says_why(connected: Connect) -> None:
    connection = await connected(max_pending_bytes=8)
    replies = await opened(connection)
    with pytest.raises(PayloadTooLargeError):
        await replies.request(question(b"x" * (connection.max_payload + 1)), PATIENCE_S)
    connection.publish(SUBJECT, b"fills the buffer")
    with pytest.raises(ConnectionError, match="waiting for the broker"):
        await replies.request(question(), PATIENCE_S)
    await connection.close()
    with pytest.raises(ConnectionError, match="closed"):
        await replies.request(question(), PATIENCE_S)


async def test_a_request_that_was_cancelled_is_forgotten_with_its_reply(connected: Connect) -> None:
    connection = await connected()
    heard, replies = Inbox(), await opened(connection)
    await connection.subscribe(SUBJECT, heard)
    reply = replies.request(question(), PATIENCE_S)
    reply.cancel()
    await heard.until(1)
    connection.publish(heard.messages[0].reply, b"too late")
    await works(connection)
    assert repr(replies) == "<ReplyInbox of 0 requests>"
