"""The messages between an engine and the processes that compile and follow constraints, and the sockets for them."""

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence as Listing
from typing import Generic, TypeVar

import msgspec

from tokenbus.worker.contract import engine_request

_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS_AT_ONCE = 8


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages."""


class Setup(ChannelMessage, frozen=True):
    """Engine to nursery: the model's vocabulary."""

    token_bytes: list[bytes]
    end_token_ids: tuple[int, ...]


class Fork(ChannelMessage, frozen=True):
    """Engine to a process, with a socket attached: make a copy of yourself that listens on it."""


class Born(ChannelMessage, frozen=True):
    """A new process to the engine, with a descriptor attached by which the process can be killed."""


class Compile(ChannelMessage, frozen=True):
    """Engine to a child of the nursery: compile a constraint, and then fork for each sequence."""

    constraint: engine_request.Constraint


class Compiled(ChannelMessage, frozen=True):
    """The constraint is compiled, which took `grown_bytes` of memory."""

    grown_bytes: int


class Failed(ChannelMessage, frozen=True):
    """The constraint can't be compiled, or can't be followed any further."""

    problem: str
    line: int | None = None
    """The faulty line of a Lark grammar, from 1, if known."""


class Begin(ChannelMessage, frozen=True):
    """Engine to a process that follows a sequence: these are its tokens so far."""

    token_ids: list[int]


class Next(ChannelMessage, frozen=True):
    """Engine to a process that follows a sequence: its next token after the forced ones; None asks what follows
    these."""

    token_id: int | None


class MatcherState(ChannelMessage, frozen=True):
    """A process to the engine: the forced tokens, and a mask of the tokens allowed after them, one bit each.

    The mask is empty if a forced token ends the output, or if more tokens may be forced."""

    forced: list[int]
    mask: bytes


class Encode(ChannelMessage, frozen=True):
    """A process to the engine: tokenize a text, and answer with `Encoded`."""

    text: str


class Encoded(ChannelMessage, frozen=True):
    """Engine to a process: the answer to `Encode`."""

    token_ids: list[int]


Command = Setup | Fork | Compile | Begin | Next | Encoded
Report = Born | Compiled | Failed | MatcherState | Encode


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

    def send(self, message: ChannelMessage, descriptors: Listing[int] = ()) -> None:
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
