"""What arrives from a broker is read as nats-py reads it, however it is cut."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from tokenbus.protocol.bus.message_reader import MessageReader


class Seen(NamedTuple):
    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    payload: bytes


class Transport(asyncio.Transport):
    """Records whether it reads."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return False


class Reading:
    """A reader of messages, and what it takes and leaves; it does not take those of the subscriptions `left`."""

    def __init__(self, left: Sequence[int] = (), already: bytes = b"") -> None:
        self.taken: list[Seen] = []
        self.transport = Transport()
        self._left = left
        self._stream = asyncio.StreamReader(loop=asyncio.get_running_loop())
        self._stream.set_transport(self.transport)
        self._stream.feed_data(already)
        self.reader = MessageReader(self._stream, self._take)

    def _take(self, *message: Any) -> bool:
        seen = Seen(*message)
        if seen.sid not in self._left:
            self.taken.append(seen)
        return seen.sid not in self._left

    def feed(self, *pieces: bytes) -> None:
        """Passes pieces to whatever the transport calls."""
        for piece in pieces:
            self._stream.feed_data(piece)

    async def passed_on(self) -> bytes:
        self._stream.feed_eof()
        return await self._stream.read()


class Client:
    """Stands for nats-py's client, and records what its parser calls."""

    def __init__(self) -> None:
        self.messages: list[Seen] = []
        self.lines: list[object] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self.messages.append(Seen(sid, subject, reply, headers or b"", payload))

    async def _process_err(self, words: str) -> None:
        self.lines.append(words)

    async def _process_ping(self) -> None:
        self.lines.append("ping")

    async def _process_pong(self) -> None:
        self.lines.append("pong")

    async def _process_info(self, info: object) -> None:
        self.lines.append(info)


async def parsed(stream: bytes) -> Client:
    client = Client()
    await Parser(client).parse(stream)  # type: ignore[no-untyped-call]
    return client


_words = st.text("abc.$_=-*>MSG", min_size=1, max_size=12).map(str.encode)
_bodies = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 1 0\r\n\r\n", b"PING\r\n"])


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    sid, subject, payload = draw(st.integers(1, 5)), draw(_words), draw(_bodies)
    headers = draw(st.none() | _bodies.map(lambda block: b"NATS/1.0\r\n" + block + b"\r\n\r\n"))
    reply = draw(st.just(b"") | _words.map(lambda word: word + b" "))
    if headers is None:
        return b"MSG %b %d %b%d\r\n%b\r\n" % (subject, sid, reply, len(payload), payload)
    size = len(headers) + len(payload)
    return b"HMSG %b %d %b%d %d\r\n%b%b\r\n" % (subject, sid, reply, len(headers), size, headers, payload)


_lines = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Stale Connection'\r\n", b'INFO {"a":"MSG"}\r\n']
)


@st.composite
def _cut(draw: st.DrawFn) -> list[bytes]:
    stream = b"".join(draw(st.lists(_messages() | _lines, max_size=8)))
    places = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [stream[begin:end] for begin, end in zip([0, *places], [*places, len(stream)], strict=True)]


@given(_cut(), st.sets(st.integers(1, 5)))
async def test_messages_and_lines_are_those_that_nats_py_finds_wherever_the_stream_is_cut(
    pieces: list[bytes], left: set[int]
) -> None:
    known, (first, *others) = await parsed(b"".join(pieces)), pieces
    reading = Reading(sorted(left), first)
    reading.feed(*others)
    rest = await parsed(await reading.passed_on())
    assert reading.taken == [one for one in known.messages if one.sid not in left]
    assert rest.messages == [one for one in known.messages if one.sid in left]
    assert rest.lines == known.lines


@pytest.mark.parametrize(
    "line", [b"", b"?", b"MSG", b"MSG a 1", b"HMSG a 1 2", b"MSG a 1 b c 2", b"MSG a 1 -2", b"MSG a b 2"]
)
async def test_a_line_that_is_no_message_is_left_to_nats_py(line: bytes) -> None:
    reading = Reading()
    reading.feed(line + b"\r\n")
    assert (reading.taken, await reading.passed_on()) == ([], line + b"\r\n")


async def test_a_large_message_is_joined_once() -> None:
    reading, size = Reading(), 8 << 20
    whole = b"MSG a 1 %d\r\n%b\r\n" % (size, bytes(size))
    reading.feed(*(whole[begin : begin + 1_000] for begin in range(0, len(whole), 1_000)))
    assert [len(one.payload) for one in reading.taken] == [size]


async def test_a_stopped_reader_takes_nothing_more_not_even_of_what_has_arrived() -> None:
    reading = Reading()
    take = reading.reader._take

    def take_one(*message: Any) -> bool:
        reading.reader.stop()
        return take(*message)

    reading.reader._take = take_one
    reading.feed(2 * b"MSG a 1 0\r\n\r\n" + b"MSG a 1 ", b"0\r\n\r\n")
    assert (len(reading.taken), await reading.passed_on()) == (1, b"")


async def test_after_a_large_arrival_everything_else_has_its_turn_before_the_next() -> None:
    reading = Reading()
    reading.feed(6_000 * b"MSG a 1 0\r\n\r\n")
    assert (len(reading.taken), reading.transport.is_paused) == (6_000, True)
    await asyncio.sleep(0)
    assert not reading.transport.is_paused
