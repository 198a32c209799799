"""The connection survives what a broker and its own users do to it. Every test has a real nats-server of its own."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import structlog
from nats.aio.msg import Msg

from tokenbus.cli import nats_server
from tokenbus.protocol.bus.bus import (
    BadSubjectError,
    NoRespondersError,
    OutboundBufferLimitError,
    PayloadTooLargeError,
    is_no_responders,
)
from tokenbus.protocol.bus.connection import Connection, Settings, connect, default_max_request_bytes
from tokenbus.protocol.wire import limits

Connect = Callable[..., Awaitable[Connection]]
SUBJECT = "test.subject"
PATIENCE_S = 15.0


class Inbox:
    """Keeps what a subscription delivers, and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []
        self._changed = asyncio.Event()

    def __call__(self, message: Msg) -> None:
        self.messages.append(message)
        self._changed.set()

    @property
    def payloads(self) -> list[bytes]:
        return [message.data for message in self.messages]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()


class Server:
    """A broker on one port, through all its lives."""

    def __init__(self, log_path: Path) -> None:
        self.running: nats_server.NatsServer | None = None
        self._log_path = log_path
        self._port = 0

    async def start(self) -> str:
        self.running = await nats_server.start(self._port, self._log_path)
        self._port = urlsplit(self.running.url).port or 0
        return self.running.url

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It is there and answers nothing."""
        assert self.running is not None
        os.kill(self.running.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.running.pid, os.WSTOPPED)
        try:
            yield
        finally:
            os.kill(self.running.pid, signal.SIGCONT)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "nats-server.log")
    await server.start()
    yield server
    server.kill()


@pytest.fixture
async def connected(server: Server) -> AsyncIterator[Connect]:
    """Makes connections to the server, and closes them."""
    made: list[Connection] = []

    async def make(**changes: object) -> Connection:
        assert server.running is not None
        settings = Settings(**({"url": server.running.url} | changes))  # type: ignore[arg-type]
        made.append(await connect(settings, f"test-{len(made)}"))
        return made[-1]

    yield make
    for connection in made:
        await connection.close()


async def outage(server: Server, connection: Connection) -> None:
    """Ends the broker; returns when the connection has noticed."""
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while connection.is_connected:
            await asyncio.sleep(0)  # there is no event for this: let the loop see the end of the stream


async def back(server: Server, connection: Connection) -> None:
    """Starts the broker again; returns when the connection has been made again."""
    reconnected = asyncio.Event()
    connection.on_reconnect = reconnected.set
    await server.start()
    async with asyncio.timeout(PATIENCE_S):
        await reconnected.wait()


async def works(connection: Connection) -> None:
    """A message still goes to the broker and comes back."""
    inbox = Inbox()
    subject = connection.new_inbox()
    subscription = await connection.subscribe(subject, inbox)
    connection.publish(subject, b"still here")
    await inbox.until(1)
    assert inbox.payloads == [b"still here"]
    await connection.unsubscribe(subscription)


# Publishing


async def test_messages_arrive_in_order_with_reply_and_headers(connected: Connect) -> None:
    sender, receiver = await connected(), await connected()
    inbox = Inbox()
    await receiver.subscribe(SUBJECT, inbox)
    await receiver.flush()
    sender.publish(SUBJECT, b"")
    sender.publish(SUBJECT, b"two", reply="_INBOX.a", headers={"Content-Type": "application/msgpack", "x": "y z"})
    sender.publish(SUBJECT, b"\r\n\x00\xff")
    await inbox.until(3)
    assert inbox.payloads == [b"", b"two", b"\r\n\x00\xff"]
    assert [message.reply for message in inbox.messages] == ["", "_INBOX.a", ""]
    assert inbox.messages[0].headers is None
    assert inbox.messages[1].headers == {"Content-Type": "application/msgpack", "x": "y z"}


async def test_a_header_can_not_break_out_of_its_line(connected: Connect) -> None:
    connection = await connected()
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    connection.publish(SUBJECT, b"a", headers={"error": "one\r\ntwo: three\r\n\r\nPUB x 0\r\n"})
    await inbox.until(1)
    assert inbox.payloads == [b"a"]
    assert inbox.messages[0].headers == {"error": "one two: three PUB x 0"}


async def test_a_flush_is_a_barrier(connected: Connect) -> None:
    sender, receiver = await connected(), await connected()
    inbox = Inbox()
    subscription = await receiver.subscribe(SUBJECT, inbox)
    await receiver.flush()
    for number in range(20_000):  # 20 MB: more than the sockets between them hold
        sender.publish(SUBJECT, b"%1000d" % number)
    await sender.flush(timeout_s=PATIENCE_S)
    # The broker now has them all, so that the receiver gets them before the end of its subscription.
    await receiver.unsubscribe(subscription)
    assert inbox.payloads == [b"%1000d" % number for number in range(20_000)]


async def test_an_ended_subscription_delivers_nothing_more(connected: Connect) -> None:
    connection = await connected()
    ended, other = Inbox(), Inbox()
    subscription = await connection.subscribe(SUBJECT, ended)
    await connection.unsubscribe(subscription)
    await connection.unsubscribe(subscription)
    last = await connection.subscribe(SUBJECT, other)
    connection.publish(SUBJECT, b"a")
    await connection.flush()
    await connection.unsubscribe(last)
    assert (ended.payloads, other.payloads) == ([], [b"a"])


async def test_of_a_queue_group_one_gets_each_message(connected: Connect) -> None:
    connections = [await connected() for _ in range(3)]
    inboxes = [Inbox() for _ in connections]
    subscriptions = [
        await connection.subscribe(SUBJECT, inbox, queue="router")
        for connection, inbox in zip(connections, inboxes, strict=True)
    ]
    for connection in connections:
        await connection.flush()
    for number in range(100):
        connections[0].publish(SUBJECT, b"%d" % number)
    await connections[0].flush()
    for connection, subscription in zip(connections, subscriptions, strict=True):
        await connection.unsubscribe(subscription)
    arrived = [payload for inbox in inboxes for payload in inbox.payloads]
    assert sorted(arrived) == sorted(b"%d" % number for number in range(100))


# Flush


async def test_a_cancelled_flush_does_not_break_the_connection(connected: Connect) -> None:
    connection = await connected()
    for _ in range(5):
        flush = asyncio.create_task(connection.flush())
        await asyncio.sleep(0)  # one turn, in which it begins
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
    await connection.flush()
    await works(connection)


async def test_a_flush_that_times_out_does_not_break_the_connection(server: Server, connected: Connect) -> None:
    connection = await connected()
    with server.frozen():
        for _ in range(5):
            with pytest.raises(TimeoutError, match="did not answer"):
                await connection.flush(timeout_s=0.01)
    await connection.flush()
    await works(connection)


async def test_a_flush_is_a_barrier_also_while_answers_to_earlier_ones_are_still_to_come(
    server: Server, connected: Connect
) -> None:
    sender, receiver = await connected(), await connected()
    inbox = Inbox()
    subscription = await receiver.subscribe(SUBJECT, inbox)
    await receiver.flush()
    with server.frozen():
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await sender.flush(timeout_s=0.01)
        for _ in range(20_000):
            sender.publish(SUBJECT, b"x" * 1_000)
    await sender.flush(timeout_s=PATIENCE_S)
    await receiver.unsubscribe(subscription)
    assert len(inbox.messages) == 20_000


async def test_many_flushes_at_once_all_return(connected: Connect) -> None:
    connection = await connected()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(connection.flush() for _ in range(100)))
    await works(connection)


# Callbacks


async def test_a_callback_that_raises_is_logged_and_does_not_end_the_subscription(connected: Connect) -> None:
    inbox = Inbox()

    def fail_at_first(message: Msg) -> None:
        inbox(message)
        if len(inbox.messages) <= 2:
            raise RuntimeError("a bug")

    with structlog.testing.capture_logs() as logs:
        connection = await connected()
        await connection.subscribe(SUBJECT, fail_at_first)
        for number in range(4):
            connection.publish(SUBJECT, b"%d" % number)
        await inbox.until(4)
    assert inbox.payloads == [b"0", b"1", b"2", b"3"]
    assert [(line["event"], line["log_level"], line["subject"]) for line in logs] == [
        ("message_failed", "error", SUBJECT)
    ] * 2
    await works(connection)


# Sizes


@pytest.mark.parametrize("headers", [None, {"Content-Type": "application/msgpack"}])
async def test_a_message_may_be_as_large_as_the_broker_takes_and_not_one_byte_larger(
    connected: Connect, headers: dict[str, str] | None
) -> None:
    connection = await connected()
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    header_bytes = len(b"NATS/1.0\r\nContent-Type: application/msgpack\r\n\r\n") if headers else 0
    largest = connection.max_payload - header_bytes
    with pytest.raises(PayloadTooLargeError, match=str(connection.max_payload)):
        connection.publish(SUBJECT, b"x" * (largest + 1), headers=headers)
    connection.publish(SUBJECT, b"x" * largest, headers=headers)
    await inbox.until(1)
    assert [len(payload) for payload in inbox.payloads] == [largest]
    assert connection.is_connected
    await works(connection)


@pytest.mark.parametrize(
    ("subject", "reply"),
    [("", ""), ("a b", ""), ("a\r\nPUB x 0", ""), ("a", "b c"), ("a" * 4_100, ""), ("a", "b" * 4_100)],
)
async def test_a_subject_for_which_the_broker_would_hang_up_is_refused_to_its_publisher(
    connected: Connect, subject: str, reply: str
) -> None:
    connection, inbox = await connected(), Inbox()
    await connection.subscribe(SUBJECT, inbox)
    for headers in (None, {"a": "b"}):
        with pytest.raises(BadSubjectError):
            connection.publish(subject, b"x", reply, headers)
    connection.publish(SUBJECT, b"next")
    connection.publish(SUBJECT, b"long", "r" * (limits.MAX_CONTROL_LINE_BYTES - 40))
    await inbox.until(2)
    assert inbox.payloads == [b"next", b"long"]


async def test_inboxes_can_not_be_guessed_from_earlier_ones(connected: Connect) -> None:
    connection = await connected()
    names = [connection.new_inbox().rpartition(".")[2] for _ in range(3)]
    numbers = [int(name, 36) for name in names]
    assert numbers[2] - numbers[1] != numbers[1] - numbers[0]
    assert len({name[:8] for name in names}) == 3


async def test_a_request_leaves_room_for_its_subjects_and_headers(connected: Connect) -> None:
    connection = await connected()

    def answer(message: Msg) -> None:
        connection.publish(message.reply, b"%d" % len(message.data))

    await connection.subscribe(SUBJECT, answer)
    largest = connection.max_payload - limits.MESSAGE_RESERVE_BYTES
    with pytest.raises(PayloadTooLargeError):
        await connection.request(SUBJECT, b"x" * (largest + 1), timeout_s=PATIENCE_S)
    reply = await connection.request(SUBJECT, b"x" * largest, timeout_s=PATIENCE_S, headers={"a": "b"})
    assert reply.data == b"%d" % largest


async def test_more_than_may_wait_is_refused_and_what_waits_is_sent(connected: Connect) -> None:
    one = len(f"PUB {SUBJECT}  1\r\nx\r\n")
    connection = await connected(max_pending_bytes=3 * one)
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    await connection.flush()
    for _ in range(4):
        connection.publish(SUBJECT, b"x")
    with pytest.raises(OutboundBufferLimitError):
        connection.publish(SUBJECT, b"y")
    await connection.flush()
    connection.publish(SUBJECT, b"z")
    await inbox.until(5)
    assert inbox.payloads == [b"x"] * 4 + [b"z"]


def test_half_of_what_the_broker_takes_is_for_the_request() -> None:
    assert default_max_request_bytes(1_048_576) == 524_288
    assert default_max_request_bytes(3) == 1


# Requests


async def test_a_request_gets_its_reply(connected: Connect) -> None:
    asking, answering = await connected(), await connected()

    def answer(message: Msg) -> None:
        answering.publish(message.reply, b"re: " + message.data)

    await answering.subscribe(SUBJECT, answer)
    await answering.flush()
    replies = await asyncio.gather(
        *(asking.request(SUBJECT, b"%d" % number, timeout_s=PATIENCE_S) for number in range(50))
    )
    assert [reply.data for reply in replies] == [b"re: %d" % number for number in range(50)]


async def test_a_request_that_nobody_listens_to_is_answered_at_once(connected: Connect) -> None:
    connection = await connected()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoRespondersError, match=SUBJECT):
            await connection.request(SUBJECT, b"anyone?", timeout_s=10 * PATIENCE_S)
    await works(connection)


async def test_a_request_that_nobody_answers_times_out(connected: Connect) -> None:
    connection = await connected()
    heard = Inbox()
    await connection.subscribe(SUBJECT, heard)
    with pytest.raises(TimeoutError, match=SUBJECT):
        await connection.request(SUBJECT, b"anyone?", timeout_s=0.05)
    await heard.until(1)
    await works(connection)


async def test_a_notice_that_nobody_listens_is_known_from_an_empty_reply(connected: Connect) -> None:
    connection = await connected()
    inbox = Inbox()
    reply = connection.new_inbox()
    await connection.subscribe(reply, inbox)
    connection.publish(SUBJECT, b"anyone?", reply=reply)
    await inbox.until(1)
    connection.publish(reply, b"")
    connection.publish(reply, b"", headers={"Status": "200"})
    connection.publish(reply, b"x", headers={"Status": "503"})
    await inbox.until(4)
    assert [is_no_responders(message) for message in inbox.messages] == [True, False, False, False]


async def test_inboxes_are_all_different_and_have_the_prefix_of_the_settings(connected: Connect) -> None:
    connection = await connected(inbox_prefix="_INBOX_acme")
    inboxes = {connection.new_inbox() for _ in range(100)}
    assert len(inboxes) == 100
    assert {inbox.rpartition(".")[0] for inbox in inboxes} == {"_INBOX_acme"}
    answered = Inbox()
    await connection.subscribe(SUBJECT, answered)
    with pytest.raises(TimeoutError):
        await connection.request(SUBJECT, b"", timeout_s=0.05)
    await answered.until(1)
    assert answered.messages[0].reply.startswith("_INBOX_acme.")


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


async def test_a_request_while_the_broker_is_away_times_out(server: Server, connected: Connect) -> None:
    connection = await connected()
    await outage(server, connection)
    with pytest.raises(TimeoutError):
        await connection.request(SUBJECT, b"", timeout_s=0.05)
    await back(server, connection)
    await works(connection)


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
    with pytest.raises(ConnectionError, match="start one or pass --nats URL") as caught:
        await connect(Settings(url=url, connect_timeout_s=0.5), "test")
    assert 0.5 <= loop.time() - begun < 3
    assert url in str(caught.value)


async def test_a_broker_that_comes_within_the_given_time_is_found(server: Server, connected: Connect) -> None:
    assert server.running is not None
    settings = Settings(url=server.running.url, connect_timeout_s=PATIENCE_S)
    server.kill()
    connecting = asyncio.create_task(connect(settings, "test"))
    await asyncio.sleep(0)  # one turn, in which it begins
    await server.start()
    connection = await connecting
    await works(connection)
    await connection.close()


@pytest.mark.parametrize("url", ["nats://127.0.0.1:notaport", "nats://"])
async def test_an_address_that_is_none_is_told_of(url: str) -> None:
    with pytest.raises(ConnectionError):
        await connect(Settings(url=url, connect_timeout_s=0.2), "test")


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
    with pytest.raises(ConnectionError):
        await connection.request(SUBJECT, b"x", timeout_s=PATIENCE_S)


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
