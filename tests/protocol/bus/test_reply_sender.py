"""Answers that the bus is too busy for are kept, up to a bound, and sent when it is not."""

import pytest

from tokenbus.protocol.bus.bus import OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender


class Narrow:
    """A bus that takes so many messages, each of so many bytes."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[str] = []

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        if len(payload) > 10:
            raise PayloadTooLargeError("too large")
        if self.room <= 0:
            raise OutboundBufferLimitError("too much is waiting")
        self.room -= 1
        self.sent.append(subject)


async def test_what_the_bus_is_too_busy_for_is_sent_in_order_as_it_takes_it() -> None:
    bus = Narrow()
    replies = ReplySender(bus)  # type: ignore[arg-type]
    for subject in "abc":
        replies.send(subject, b"x")
    bus.room = 2
    replies.send_pending()
    assert bus.sent == ["a", "b"]
    bus.room = 5
    replies.send_pending()
    assert bus.sent == ["a", "b", "c"]


async def test_what_waits_is_bounded_by_its_bytes() -> None:
    bus = Narrow()
    replies = ReplySender(bus, max_pending_bytes=4)  # type: ignore[arg-type]
    for subject in "abc":
        replies.send(subject, b"xx")
    bus.room = 5
    replies.send_pending()
    assert bus.sent == ["a", "b"]


async def test_what_is_too_large_is_never_kept() -> None:
    replies = ReplySender(Narrow())  # type: ignore[arg-type]
    with pytest.raises(PayloadTooLargeError):
        replies.send("a", b"x" * 11)
