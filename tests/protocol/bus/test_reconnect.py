"""A connection survives what happens to its broker, and ends when it is told to. Every test has a real nats-server."""

import asyncio
import contextlib
import socket
import threading
from urllib.parse import urlsplit

import pytest
import structlog
from nats.aio.msg import Msg

from tests.protocol.bus.harness import PATIENCE_S, SUBJECT, Connect, Inbox, Server, back, outage, works
from tokenbus.protocol.bus.bus import (
    OutboundBufferLimitError,
)
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect
from tokenbus.protocol.bus.handshake import HandshakeClient

# This process stands still


class DepartingBroker(threading.Thread):
    """Sends many messages to its only subscriber when that publishes something, and then closes the connection."""

    def __init__(self, messages: int) -> None:
        super().__init__(daemon=True)
        self._messages = messages
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.url = f"nats://127.0.0.1:{self._listening.getsockname()[1]}"

    def run(self) -> None:
        with self._listening, self._listening.accept()[0] as connected, connected.makefile("rb") as lines:
            connected.sendall(b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"headers":true}\r\n')
            for line in lines:
                if line.startswith(b"PING"):
                    connected.sendall(b"PONG\r\n")
                if line.startswith(b"PUB"):
                    lines.readline()
                    break
            connected.sendall(b"MSG %s 1 1024\r\n%s\r\n" % (SUBJECT.encode(), b"x" * 1_024) * self._messages)


async def test_what_has_arrived_meanwhile_is_read_although_the_broker_has_gone_and_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenbus.protocol.bus.nats_client._STANDSTILL_S", 0.0)
    broker = DepartingBroker(400)
    broker.start()
    connection = await connect(BusSettings(url=broker.url), "test")
    inbox = Inbox()

    def answer(message: Msg) -> None:
        inbox(message)
        with contextlib.suppress(OutboundBufferLimitError):
            connection.publish("answers", b"x")

    await connection.subscribe(SUBJECT, answer)
    await connection.flush()
    connection.publish("begin", b"")
    while connection.num_writes < 2:
        await asyncio.sleep(0)
    broker.join()  # in which the event loop stands still
    connection.publish("answers", b"x")
    await inbox.until(400)
    async with asyncio.timeout(PATIENCE_S):
        while connection.is_connected:
            await asyncio.sleep(0)
    await connection.close()


# The broker goes away


async def test_what_is_published_while_the_broker_is_away_arrives_when_it_is_back(
    server: Server, connected: Connect
) -> None:
    connection = await connected()
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    await outage(server, connection)
    for number in range(1_000):
        connection.publish(SUBJECT, b"%d" % number)
    assert repr(connection).endswith(" down>")
    await back(server, connection)
    await inbox.until(1_000)
    assert inbox.payloads == [b"%d" % number for number in range(1_000)]
    await works(connection)
    assert repr(connection).endswith(" up>")


async def test_only_so_much_waits_while_the_broker_is_away(server: Server, connected: Connect) -> None:
    one = len(f"PUB {SUBJECT}  1\r\nx\r\n")
    connection = await connected(max_pending_bytes=9 * one)
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    await connection.flush()
    await outage(server, connection)
    for _ in range(10):
        connection.publish(SUBJECT, b"x")
    with pytest.raises(OutboundBufferLimitError):
        connection.publish(SUBJECT, b"y")
    await back(server, connection)
    await inbox.until(10)
    await works(connection)
    assert inbox.payloads == [b"x"] * 10


async def test_a_connection_survives_one_outage_after_another(server: Server, connected: Connect) -> None:
    connection = await connected()
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    for number in range(3):
        await outage(server, connection)
        connection.publish(SUBJECT, b"%d" % number)
        await back(server, connection)
        await inbox.until(number + 1)
    assert inbox.payloads == [b"0", b"1", b"2"]


async def test_a_callback_after_a_reconnect_that_raises_is_logged_and_does_not_end_the_connection(
    server: Server, connected: Connect
) -> None:
    called = asyncio.Event()

    def fail() -> None:
        called.set()
        raise RuntimeError("a bug")

    with structlog.testing.capture_logs() as logs:
        connection = await connected()
        connection.on_reconnect = fail
        for _ in range(2):
            await outage(server, connection)
            called.clear()
            await server.start()
            async with asyncio.timeout(PATIENCE_S):
                await called.wait()
            await works(connection)
    failures = [line["subject"] for line in logs if line["event"] == "message_failed"]
    assert failures == ["reconnect", "reconnect"]


async def test_a_flush_while_the_broker_is_away_does_not_say_that_the_broker_has_everything(
    server: Server, connected: Connect
) -> None:
    connection = await connected()
    await outage(server, connection)
    connection.publish(SUBJECT, b"x")
    try:
        with pytest.raises((TimeoutError, ConnectionError)):
            await connection.flush(timeout_s=0.05)
    finally:
        await back(server, connection)


async def test_a_subscription_ended_while_the_broker_is_away_stays_ended(server: Server, connected: Connect) -> None:
    connection = await connected()
    ended, other = Inbox(), Inbox()
    subscription = await connection.subscribe(SUBJECT, ended)
    await connection.subscribe(SUBJECT, other)
    await outage(server, connection)
    await connection.unsubscribe(subscription)
    for number in range(2):
        await back(server, connection)
        connection.publish(SUBJECT, b"x")
        await other.until(number + 1)
        if number == 0:
            await outage(server, connection)
    assert (ended.payloads, other.payloads) == ([], [b"x", b"x"])


# Beginning and end


async def test_a_broker_that_is_not_there_is_told_of_within_the_given_time(server: Server) -> None:
    assert server.running is not None
    url = server.running.url
    server.kill()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(ConnectionError, match="start one, or set --nats or TOKENBUS_NATS") as caught:
        await connect(BusSettings(url=url, connect_timeout_s=0.5), "test")
    assert 0.5 <= loop.time() - begun < 3
    assert url in str(caught.value)


async def test_a_broker_that_comes_within_the_given_time_is_found(server: Server, connected: Connect) -> None:
    assert server.running is not None
    settings = BusSettings(url=server.running.url, connect_timeout_s=PATIENCE_S)
    server.kill()
    connecting = asyncio.create_task(connect(settings, "test"))
    await asyncio.sleep(0)  # one turn, in which it begins
    await server.start()
    connection = await connecting
    await works(connection)
    await connection.close()


@pytest.mark.parametrize("url", ["nats://127.0.0.1:notaport", "nats://"])
async def test_an_address_that_is_none_is_told_of(url: str) -> None:
    with pytest.raises(ValueError, match="must be nats://HOST:PORT"):
        await connect(BusSettings(url=url, connect_timeout_s=0.2), "test")


async def test_closing_writes_out_what_is_pending(connected: Connect) -> None:
    sender, receiver = await connected(), await connected()
    inbox = Inbox()
    subscription = await receiver.subscribe(SUBJECT, inbox)
    await receiver.flush()
    for _ in range(5_000):
        sender.publish(SUBJECT, b"x")
    await sender.close()
    await receiver.unsubscribe(subscription)
    assert len(inbox.messages) == 5_000


async def test_closing_twice_is_fine(connected: Connect) -> None:
    connection = await connected()
    assert not connection.is_closing
    await connection.close()
    await connection.close()
    assert connection.is_closing
    assert not connection.is_connected


async def test_closing_twice_at_once_is_fine(connected: Connect) -> None:
    connection = await connected()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(connection.close(), connection.close())
    assert not connection.is_connected


async def test_a_closed_connection_says_so(connected: Connect) -> None:
    connection = await connected()
    await connection.close()
    with pytest.raises(ConnectionError):
        connection.publish(SUBJECT, b"x")
    with pytest.raises(ConnectionError):
        await connection.flush()


async def test_a_connection_can_be_closed_while_the_broker_is_away(server: Server, connected: Connect) -> None:
    connection = await connected()
    await outage(server, connection)
    async with asyncio.timeout(PATIENCE_S):
        await connection.close()
    assert not connection.is_connected


async def test_a_connection_can_be_closed_while_messages_wait_for_a_broker_that_is_away(
    server: Server, connected: Connect
) -> None:
    connection = await connected()
    await connection.subscribe(SUBJECT, Inbox())
    await outage(server, connection)
    connection.publish(SUBJECT, b"x")
    async with asyncio.timeout(PATIENCE_S):
        await connection.close()
    assert not connection.is_connected


async def test_messages_of_several_subscriptions_come_in_the_order_in_which_they_were_published(
    server: Server, connected: Connect
) -> None:
    one, other = await connected(), await connected()
    heard: list[bytes] = []
    for name in ("a", "b", "c"):
        await one.subscribe(f"order.{name}", lambda message: heard.append(message.data))
    await one.flush()
    for number in range(300):
        other.publish(f"order.{'abc'[number % 3]}", b"%d" % number)
    await other.flush()
    await one.flush()
    assert heard == [b"%d" % number for number in range(300)]


@pytest.mark.parametrize(
    "raw",
    [
        b"PUB odd.\xff\xfe 2\r\nhi\r\n",
        b"PUB odd.subject rep\xffly 2\r\nhi\r\n",
        b"HPUB odd.subject 8 10\r\nNATS/1.0hi\r\n",
        b"HPUB odd.subject 20 22\r\nNATS/1.0 \xff\xff\xff\r\n\r\n\r\n\r\nhi\r\n",
    ],
)
async def test_a_message_that_can_not_be_decoded_deafens_nobody(server: Server, connected: Connect, raw: bytes) -> None:
    one, inbox = await connected(), Inbox()
    await one.subscribe(">", inbox)
    await one.flush()
    assert server.running is not None
    address = urlsplit(server.running.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n' + raw + b"PING\r\n")
    await writer.drain()
    await one.flush()
    one.publish("after", b"all")
    await inbox.until(1)
    async with asyncio.timeout(PATIENCE_S):
        while b"all" not in inbox.payloads:
            await one.flush()
    writer.close()


async def test_a_guard_that_says_no_keeps_everything_from_the_broker_and_the_connection_is_made_anew(
    server: Server, connected: Connect
) -> None:
    one, other, inbox = await connected(), await connected(), Inbox()
    await other.subscribe(SUBJECT, inbox)
    await other.flush()
    again = asyncio.Event()
    one.on_reconnect = again.set
    verdicts = [False]
    one.guard = lambda: verdicts.pop() if verdicts else True
    one.publish(SUBJECT, b"stale")
    async with asyncio.timeout(PATIENCE_S):
        await again.wait()
    one.publish(SUBJECT, b"fresh")
    await inbox.until(1)
    await other.flush()
    assert inbox.payloads == [b"fresh"]


async def test_an_aborted_connection_forgets_what_waited_and_serves_its_subscriptions_again(
    server: Server, connected: Connect
) -> None:
    one, other, inbox = await connected(), await connected(), Inbox()
    await one.subscribe(SUBJECT, inbox)
    await one.flush()
    again = asyncio.Event()
    one.on_reconnect = again.set
    one.publish("elsewhere", b"lost")
    one.abort()
    one.abort()
    assert not one.is_connected
    async with asyncio.timeout(PATIENCE_S):
        await again.wait()
    await one.flush()
    other.publish(SUBJECT, b"hello")
    await inbox.until(1)


async def test_what_waits_after_a_reconnect_is_written_only_once_the_owner_has_found_out_whether_it_may_be(
    server: Server, connected: Connect
) -> None:
    one, other, inbox = await connected(), await connected(), Inbox()
    await other.subscribe(SUBJECT, inbox)
    told, asked, may, again = Inbox(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    await one.subscribe("told", told)

    async def find_out() -> None:
        one.ask("nobody.hears", "told")
        asked.set()
        await may.wait()

    one.before_resume, one.on_reconnect = find_out, again.set
    await outage(server, one)
    one.publish(SUBJECT, b"waits")
    await server.start()
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        await told.until(1)  # the broker's answer: the subscription is in force, and the question was sent
        while not other.is_connected:
            await asyncio.sleep(0.01)
        one.publish(SUBJECT, b"waits too")
        assert not one.is_connected, "it counts as down until then"
        one.ping()
        await other.flush()
        assert inbox.payloads == []
        may.set()
        await again.wait()
    await inbox.until(2)
    assert inbox.payloads == [b"waits", b"waits too"]
    await works(one)


async def test_a_first_connection_has_nothing_to_resume(server: Server) -> None:
    async def find_out() -> None:
        raise AssertionError("it was never down")

    connection = Connection(BusSettings(server.running.url), "test")
    connection.before_resume = find_out
    await connection.open()
    await works(connection)
    await connection.close()


async def test_an_owner_that_aborts_before_it_resumes_never_writes_what_waited(
    server: Server, connected: Connect
) -> None:
    one, other, inbox = await connected(), await connected(), Inbox()
    await other.subscribe(SUBJECT, inbox)
    await other.flush()
    again, verdicts = asyncio.Event(), ["abort"]

    async def find_out() -> None:
        if verdicts:
            verdicts.pop()
            one.publish(SUBJECT, b"stale")
            one.abort()

    one.before_resume, one.on_reconnect = find_out, again.set
    one.abort()
    async with asyncio.timeout(PATIENCE_S):
        await again.wait()
    one.publish(SUBJECT, b"fresh")
    await inbox.until(1)
    await other.flush()
    assert inbox.payloads == [b"fresh"]


async def test_a_connection_that_has_stopped_trying_to_reconnect_says_so(
    connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends then, and is started anew: otherwise it would stay deaf for ever."""

    async def fail(_: object) -> None:
        raise KeyError("a bug")

    connection = await connected()
    monkeypatch.setattr(HandshakeClient, "_attempt_reconnect", fail)
    connection.abort()
    with pytest.raises(ConnectionError, match="for good"):
        async with asyncio.timeout(PATIENCE_S):
            await connection.wait_closed()
