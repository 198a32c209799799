"""One end of a socket over which processes exchange length-prefixed messages and file descriptors."""

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence as Listing
from typing import Generic, TypeVar

import msgspec

from tokenbus.worker.engine.constraints.isolated import messages

_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS_AT_ONCE = 8
_encoder = msgspec.msgpack.Encoder()

Received = TypeVar("Received")


class Channel(Generic[Received]):
    """Sends any message and receives those known to its decoder. Raises EOFError once the other end is closed."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[Received]") -> None:
        self._sock = sock
        self._decoder = decoder
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<Channel {self._sock.fileno()}>"

    def send(self, message: messages.ChannelMessage, descriptors: Listing[int] = ()) -> None:
        body = _encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            if descriptors:  # they arrive with the first byte
                data = data[socket.send_fds(self._sock, [data], list(descriptors)) :]
            self._sock.sendall(data)
        except OSError as error:
            raise EOFError from error

    def receive(self) -> Received:
        """Waits for and returns the next message."""
        while (body := self._take()) is None:
            self._read()
        return self._decoder.decode(body)

    def has_message(self, timeout_s: float) -> bool:
        """Waits at most this long; returns whether a message, or the end, has started to arrive."""
        if self._buffer:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def take_descriptor(self) -> int:
        """Returns the next descriptor received with a message."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Closes this end, even during a `receive` on another thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.release()

    def release(self) -> None:
        """Closes this process's descriptor; another process may have its own."""
        self._sock.close()

    def _take(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, _MAX_DESCRIPTORS_AT_ONCE)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._buffer += data
        self._descriptors += descriptors
