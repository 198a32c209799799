"""Messages over one end of a socket pair: a length of four bytes, and as many bytes.

`multiprocessing.connection` has such messages too. But it pickles unless one takes care, and it can wait without limit
in the middle of a message, on a peer that was stopped there."""

import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 20

READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class Frames:
    """Sends and receives messages. All waiting is `wait`'s, if it is given: nothing else blocks.

    `wait` gets READABLE or WRITABLE, returns when the socket is that (or is broken), and may raise to give up. The
    stream is in the middle of a message then and of no more use."""

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
