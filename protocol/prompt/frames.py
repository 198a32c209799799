"""Messages over one end of a socket pair: a four-byte length, then that many bytes.

`multiprocessing.connection` has such messages too, but it pickles unless one takes care, and it can wait forever in the
middle of a message if the peer was stopped there."""

import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 20

READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class Frames:
    """Sends and receives messages. If `wait` is given, it does all waiting: nothing else blocks.

    `wait` is passed READABLE or WRITABLE, returns when the socket is in that state (or broken), and may raise to give
    up. That leaves the stream in the middle of a message, so it can't be used any more."""

    def __init__(self, end: socket.socket, wait: Callable[[int], None] | None = None) -> None:
        self._socket = end
        self._wait = wait
        end.setblocking(wait is None)

    def __repr__(self) -> str:
        return f"<Frames {self._socket.fileno()}>"

    def send(self, body: bytes) -> None:
        """Sends a message. Raises OSError if the peer is gone."""
        left = memoryview(_LENGTH.pack(len(body)) + body)
        while left:
            if self._wait is not None:
                self._wait(WRITABLE)
            left = left[self._socket.send(left) :]

    def receive(self) -> bytes:
        """Returns the next message. Raises EOFError if the peer is gone, or OSError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, num_bytes: int) -> bytes:
        body = bytearray()
        while len(body) < num_bytes:
            if self._wait is not None:
                self._wait(READABLE)
            part = self._socket.recv(min(_READ_BYTES, num_bytes - len(body)))
            if not part:
                raise EOFError
            body += part
        return bytes(body)
