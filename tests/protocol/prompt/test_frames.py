"""Messages between a renderer process and its parent."""

import socket
from collections.abc import Callable, Iterator

import pytest

from tokenbus.protocol.prompt.rendering import READABLE, WRITABLE, Frames

Pair = tuple[socket.socket, socket.socket]


class StalledError(Exception):
    """Nothing more comes."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def giving_up(after: int, waits: list[int]) -> Callable[[int], None]:
    """Waits so many times, and notes for what."""

    def wait(event: int) -> None:
        waits.append(event)
        if len(waits) > after:
            raise StalledError

    return wait


def test_messages_arrive_whole_and_in_order_the_empty_one_too(pair: Pair) -> None:
    one, other = Frames(pair[0]), Frames(pair[1])
    for body in (b"first", b"", b"\x00" * 10_000):
        one.send(body)
    assert [other.receive() for _ in range(3)] == [b"first", b"", b"\x00" * 10_000]


@pytest.mark.parametrize("at", range(8))
def test_a_message_that_stops_anywhere_blocks_nobody(pair: Pair, at: int) -> None:
    Frames(pair[0]).send(b"four")
    whole = pair[1].recv(100)
    pair[0].sendall(whole[:at])
    waits: list[int] = []
    with pytest.raises(StalledError):
        Frames(pair[1], giving_up((at > 0) + (at > 4), waits)).receive()
    assert set(waits) == {READABLE}


def test_a_peer_that_reads_nothing_blocks_no_sender(pair: Pair) -> None:
    waits: list[int] = []
    with pytest.raises(StalledError):
        Frames(pair[0], giving_up(1, waits)).send(b"\x00" * 50_000_000)
    assert waits == [WRITABLE, WRITABLE]


def test_a_peer_that_is_gone_is_an_error_on_both_sides(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(EOFError):
        Frames(pair[1]).receive()
    with pytest.raises(OSError):
        Frames(pair[1]).send(b"x")
