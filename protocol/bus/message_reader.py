"""Takes messages off the stream as they arrive, and leaves every other line of the broker's to nats-py.

nats-py reads in a task, which each arrival wakes, and tries an expression for each kind of line. That costs more than
what most messages are about, so those with a callback are found here, by the stream's own callback.
"""

import asyncio
from collections.abc import Callable

Take = Callable[[int, bytes, bytes, bytes, bytes], bool]
"""Takes a message: its subscription's id, subject, reply subject, headers and payload. Returns False for one that
nats-py is to read."""

_END = b"\r\n"
_NUM_SIZES = {b"MSG": 1, b"HMSG": 2}
"""The number of sizes at the end of a control line, after its kind, subject, subscription and reply subject."""
_MIN_OTHERS, _MAX_OTHERS = 3, 4
_MUCH_BYTES = 65_536
"""An arrival of this size is followed by others: everything else in this process has its turn before them."""


class MessageReader:
    """Stands before nats-py's reader of one connection, from the handshake on."""

    def __init__(self, reader: asyncio.StreamReader, take: Take) -> None:
        self._transport: asyncio.ReadTransport = reader._transport  # type: ignore[attr-defined]
        self._take = take
        self._pass_on = reader.feed_data
        self._begun: list[bytes] = []
        """The pieces of a line or message that has not arrived whole."""
        self._missing_bytes = 0
        """At least so much of it is still to come."""
        self._is_stopped = False
        reader.feed_data = self.feed  # type: ignore[method-assign, assignment]
        buffer: bytearray = reader._buffer  # type: ignore[attr-defined]
        already = bytes(buffer)
        buffer.clear()
        self.feed(already)

    def __repr__(self) -> str:
        return f"<MessageReader, {sum(map(len, self._begun))} bytes of a message>"

    def stop(self) -> None:
        """Drops whatever has arrived and is not yet taken, and what still comes."""
        self._is_stopped = True
        self._begun.clear()

    def feed(self, data: bytes) -> None:
        """Takes the messages whose last byte is here, in order; the rest waits for more."""
        if self._is_stopped:
            return
        if len(data) >= _MUCH_BYTES and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._transport.resume_reading)
        self._missing_bytes -= len(data)
        if self._begun:
            self._begun.append(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._begun)
        begin = self._take_whole(data)
        self._begun = [data[begin:]] if begin < len(data) and not self._is_stopped else []

    def _take_whole(self, data: bytes) -> int:
        """Takes what is complete and returns where the rest begins."""
        begin = self._missing_bytes = 0
        while not self._is_stopped and (end := data.find(_END, begin)) >= 0:
            words, body = data[begin:end].split(), end + 2
            num_sizes = _NUM_SIZES.get(words[0], 0) if words else 0
            num_others = len(words) - num_sizes
            if (
                not num_sizes
                or not _MIN_OTHERS <= num_others <= _MAX_OTHERS
                or not (words[2] + words[-num_sizes] + words[-1]).isdigit()
            ):
                self._pass_on(data[begin:body])
                begin = body
                continue
            after = body + int(words[-1]) + 2
            if after > len(data):
                self._missing_bytes = after - len(data)
                break
            payload = body if num_sizes == 1 else body + int(words[-2])
            reply = words[3] if num_others == _MAX_OTHERS else b""
            if not self._take(int(words[2]), words[1], reply, data[body:payload], data[payload : after - 2]):
                self._pass_on(data[begin:after])
            begin = after
        return begin
