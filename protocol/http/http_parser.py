"""Parses HTTP/1.1 with h11, and rejects what h11 accepts but a server open to strangers must not; pure."""

import re
from typing import Any

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FREE_CHUNKS = 1_024
_MIN_CHUNK_BYTES = 16
"""Minimum mean size of chunks, once there are more than these. Parsing a chunk takes 5 us however small it is: a read
of 256 KiB full of one-byte chunks would block the event loop for a fifth of a second."""


class Parser(h11.Connection):
    """The server's side of one connection. After a RemoteProtocolError, `status` and `problem` say how to answer it."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0
        self.is_head = False
        """Whether the last request was a HEAD request, whose response has no body."""
        self.status = 400
        self.problem = ""

    @property
    def is_request_complete(self) -> bool:
        """Whether a request has been received to its end."""
        return self.their_state not in (h11.IDLE, h11.SEND_BODY)

    @property
    def has_begun(self) -> bool:
        """Whether part of a request has been received."""
        return self.their_state is not h11.IDLE or bool(self.trailing_data[0])

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            # The client may now leave the body out: only the end of the connection tells it from a next request.
            headers = [*event.headers.raw_items(), (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)

    def next_event(self) -> Any:
        try:
            self._check_head_size()
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.status, self.problem = error.error_status_hint, str(error).partition(":")[0]  # h11 quotes what came
            raise
        return event

    def _check_head_size(self) -> None:
        """Limits heads that arrive in one piece: h11 only limits those that are still incomplete."""
        if self.their_state is h11.IDLE:
            waiting, _ = self.trailing_data
            if len(waiting) > MAX_HEAD_BYTES and not _END_OF_HEAD.search(waiting, 0, MAX_HEAD_BYTES):
                raise h11.RemoteProtocolError(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)

    def _check(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0  # counted for each request
            self.is_head = event.method == b"HEAD"
            _check_request(event)
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS and self._num_bytes < self._num_chunks * _MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body comes in too many small chunks", 400)


def _check_request(request: h11.Request) -> None:
    """Rejects ambiguous body lengths: a proxy that reads one differently would take part of a body for a request."""
    names = [name for name, _ in request.headers]
    if len(names) > MAX_HEADERS:
        raise h11.RemoteProtocolError(f"there are more than {MAX_HEADERS} headers", 431)
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both", 400)
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding needs HTTP/1.1", 400)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("this server speaks HTTP/1.1", 505)
