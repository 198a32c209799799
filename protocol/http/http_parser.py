"""Parses HTTP/1.1 with h11, and refuses what h11 lets through and a server that strangers reach must not; pure."""

import re
from typing import Any

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FREE_PIECES = 1_024
_LEAST_BYTES_A_PIECE = 16
"""A chunk of one byte takes 5 us to parse: 256 KiB of them would hold the process up for a fifth of a second."""


class Parser(h11.Connection):
    """A server's side of one connection. `next_event` raises RemoteProtocolError, with the status of the answer."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_pieces = 0
        self._num_bytes = 0
        self.is_head = False
        """Whether the last request asks for a head alone."""
        self.status = 400
        """What the last RemoteProtocolError is to be answered with, and why."""
        self.problem = ""

    @property
    def has_begun(self) -> bool:
        """Whether something of a request has come that is not complete."""
        return self.their_state is not h11.IDLE or bool(self.trailing_data[0])

    def next_event(self) -> Any:
        """As h11's."""
        try:
            self._check_head_size()
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.status, self.problem = error.error_status_hint, str(error).partition(":")[0]  # h11 quotes what came
            raise
        return event

    def _check_head_size(self) -> None:
        """h11 bounds a head that is not complete, but parses any that comes in one piece."""
        if self.their_state is h11.IDLE:
            waiting, _ = self.trailing_data
            if len(waiting) > MAX_HEAD_BYTES and not _END_OF_HEAD.search(waiting, 0, MAX_HEAD_BYTES):
                raise h11.RemoteProtocolError(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)

    def _check(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            self.is_head = event.method == b"HEAD"
            _check_request(event)
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > _FREE_PIECES and self._num_bytes < self._num_pieces * _LEAST_BYTES_A_PIECE:
                raise h11.RemoteProtocolError("the body comes in too many small pieces", 400)


def _check_request(request: h11.Request) -> None:
    """A proxy that reads a body's length otherwise than this server would take its end for another request."""
    names = [name for name, _ in request.headers]
    if len(names) > MAX_HEADERS:
        raise h11.RemoteProtocolError(f"there are more than {MAX_HEADERS} headers", 431)
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both", 400)
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding needs HTTP/1.1", 400)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("this server speaks HTTP/1.1", 505)
