"""What front and engine process say to each other over their socket: length-prefixed MessagePack."""

import socket
import struct
from collections.abc import Iterator

import msgspec

from protocol import errors, internal, messages
from worker import contract
from worker.engine.sequence import End

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above the largest real frame, a vocabulary; a larger length means that the stream is corrupt."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames."""


class Add(Frame, frozen=True):
    """Front to engine: a sequence that fits."""

    seq_no: int
    token_ids: bytes
    sampling: contract.Sampling


class Abort(Frame, frozen=True):
    """Front to engine: end a sequence; it answers with the sequence's end."""

    seq_no: int


class AskTokens(Frame, frozen=True):
    """Front to engine: tokenize; answered by `Tokens` with the same ticket."""

    ticket: int
    request: internal.Tokenize


Command = Add | Abort | AskTokens


class Loading(Frame, frozen=True):
    """Engine to front: how much of the model is loaded, from 0 to 1."""

    fraction: float


class LoadFailed(Frame, frozen=True):
    """Engine to front: the model can't be loaded, and what to do."""

    message: str


class Ready(Frame, frozen=True):
    """Engine to front: it serves now."""

    config: contract.EngineConfig
    pieces: list[bytes]
    bundle: bytes | None


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step did for one sequence."""

    seq_no: int
    token_id: int | None
    end: End | None


class StepReport(Frame, frozen=True):
    """Engine to front: what a step did. `started` are sequences that got a lane."""

    started: list[int]
    outputs: list[SequenceOutput]
    load: messages.Load


class Tokens(Frame, frozen=True):
    """Engine to front: the answer to `AskTokens`."""

    ticket: int
    token_ids: bytes
    error: errors.Error | None


Report = Loading | LoadFailed | Ready | StepReport | Tokens

_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(frame: Command | Report) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Cuts a stream of bytes into the bodies of frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now. Raises ValueError when the stream is corrupt."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def received(sock: socket.socket) -> Iterator[bytes]:
    """Bodies of frames from a blocking socket until its other end closes."""
    splitter = Splitter()
    while data := _receive(sock):
        yield from splitter.feed(data)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""
