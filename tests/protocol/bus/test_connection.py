"""A connection keeps its promises while its broker is there. Every test has a real nats-server of its own."""

import asyncio

import pytest
import structlog
from nats.aio.msg import Msg

from tests.protocol.bus.harness import PATIENCE_S, SUBJECT, Connect, Inbox, Server, works
from tokenbus.protocol.bus.bus import (
    BadSubjectError,
    OutboundBufferLimitError,
    Outgoing,
    PayloadTooLargeError,
    is_no_responders,
)
from tokenbus.protocol.wire import limits

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


async def test_messages_that_belong_together_are_all_queued_or_none_of_them(connected: Connect) -> None:
    one = len(f"PUB {SUBJECT}  1\r\nx\r\n")
    connection = await connected(max_pending_bytes=3 * one)
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    await connection.flush()
    connection.publish_all([Outgoing(SUBJECT, b"%d" % number) for number in range(9)])
    with pytest.raises(OutboundBufferLimitError):
        connection.publish_all([Outgoing(SUBJECT, b"y"), Outgoing(SUBJECT, b"y")])
    await connection.flush()
    with pytest.raises(PayloadTooLargeError):
        connection.publish_all([Outgoing(SUBJECT, b"y"), Outgoing(SUBJECT, b"y" * (connection.max_payload + 1))])
    connection.publish_all([Outgoing(SUBJECT, b"z", "reply", {"a": "b"})])
    await inbox.until(10)
    assert inbox.payloads == [*(b"%d" % number for number in range(9)), b"z"]
    assert (inbox.messages[-1].reply, inbox.messages[-1].headers) == ("reply", {"a": "b"})


async def test_of_messages_that_belong_together_one_with_a_bad_subject_is_left_out(connected: Connect) -> None:
    connection = await connected()
    inbox = Inbox()
    await connection.subscribe(SUBJECT, inbox)
    with structlog.testing.capture_logs() as logs:
        connection.publish_all([Outgoing(SUBJECT, b"1"), Outgoing(SUBJECT, b"2", "a b"), Outgoing(SUBJECT, b"3")])
    await inbox.until(2)
    assert inbox.payloads == [b"1", b"3"]
    assert [line["event"] for line in logs] == ["nats_error"]


async def test_writes_are_counted_and_what_was_queued_since_the_last_one_is_not_written(connected: Connect) -> None:
    connection = await connected()
    before = connection.num_writes
    connection.publish(SUBJECT, b"x")
    connection.publish(SUBJECT, b"y")
    assert connection.num_writes == before
    await connection.flush()
    assert connection.num_writes == before + 1
    connection.publish(SUBJECT, b"never")
    connection.abort()
    assert connection.num_writes == before + 1


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
