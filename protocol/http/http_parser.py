"""Parses HTTP/1.1 with h11, and rejects what h11 accepts but a public server must not."""

import re
from typing import Any

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_EMPTY_LINES = re.compile(rb"(?:\r?\n)+")
_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_PATH = re.compile(rb"[!-~]+ (?:%s)?(/[!->@-~]*)[ ?]" % _ORIGIN.pattern, re.IGNORECASE)
"""The path in a request line, before h11 has recognised it as one."""
_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_QUOTED = re.compile(r": (?:b|bytearray\(b)['\"].*", re.DOTALL)
"""Text from the client, which h11 quotes at the end of its messages."""
_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS")
"""Those that are known; what is served is the application's matter."""
_FREE_CHUNKS = 1_024
_MIN_CHUNK_BYTES = 16
"""The minimum mean size of chunks, once there are more than this many. Parsing a chunk takes 5 us regardless of its
size: a 256 KiB read full of one-byte chunks would block the event loop for a fifth of a second."""


class HttpParser(h11.Connection):
    """The server's side of one connection. After a RemoteProtocolError, `status` and `problem` say how to answer it."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0
        self.is_head = False
        """Whether the last request was a HEAD request, whose response has no body."""
        self.path = ""
        """The path of the last request line received; empty where another request may begin."""
        self.status = 400
        self.problem = ""
        self._sends_events = False

    @property
    def is_request_complete(self) -> bool:
        """Whether a request has been received to its end."""
        return self.their_state not in (h11.IDLE, h11.SEND_BODY)

    @property
    def has_begun(self) -> bool:
        """Whether part of a request has been received."""
        return self.their_state is not h11.IDLE or bool(self.trailing_data[0])

    @property
    def is_http_1_0(self) -> bool:
        """Whether the last request used HTTP/1.0."""
        return self.their_http_version == b"1.0"

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:  # anything after the last request of a connection is ignored
            super().receive_data(data)

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if isinstance(event, h11.Response):
            self._sends_events = any(value.startswith(b"text/event-stream") for _, value in event.headers)
            if self.they_are_waiting_for_100_continue:
                # The client may now omit the body: only the end of the connection distinguishes it from a next request.
                headers = [*event.headers.raw_items(), (b"connection", b"close")]
                event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)

    def send_filler(self) -> bytes:
        """Returns bytes that the client will ignore: an interim response, or a comment in an event stream. Elsewhere
        there are none."""
        if self.our_state is h11.SEND_RESPONSE:
            return self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
        if self.our_state is h11.SEND_BODY and self._sends_events:
            return self.send(h11.Data(data=b":\n\n")) or b""
        return b""

    def next_event(self) -> Any:
        try:
            if self.their_state is h11.IDLE and not self._begin_head():
                return h11.NEED_DATA
            return self._checked(super().next_event())
        except h11.RemoteProtocolError as error:
            self.status, self.problem = error.error_status_hint, _QUOTED.sub("", str(error))
            raise

    def _begin_head(self) -> bool:
        """Skips empty lines, which some clients send after a body, notes the path, and limits the size of heads that
        arrive in one piece: h11 limits only incomplete ones. Returns whether h11 may continue."""
        waiting, _ = self.trailing_data
        empty = _EMPTY_LINES.match(waiting)
        if empty is not None:
            self._receive_buffer.maybe_extract_at_most(empty.end())
            waiting = waiting[empty.end() :]
        path = _PATH.match(waiting)
        self.path = path[1].decode() if path else ""
        if len(waiting) > MAX_HEAD_BYTES and not _END_OF_HEAD.search(waiting, 0, MAX_HEAD_BYTES):
            raise h11.RemoteProtocolError(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)
        return waiting != b"\r"  # half an empty line, which h11 would reject

    def _checked(self, event: Any) -> Any:
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0  # counted for each request
            self.is_head = event.method == b"HEAD"
            _check_request(event)
            return _in_origin_form(event)
        if isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS and self._num_bytes < self._num_chunks * _MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many small chunks", 400)
        return event


def _check_request(request: h11.Request) -> None:
    """Rejects ambiguous body lengths: a proxy that interprets one differently would take part of a body for a
    request."""
    names = [name for name, _ in request.headers]
    if len(names) > MAX_HEADERS:
        raise h11.RemoteProtocolError(f"there are more than {MAX_HEADERS} headers", 431)
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both", 400)
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding needs HTTP/1.1", 400)
    if request.method not in _METHODS:
        raise h11.RemoteProtocolError(f"the method must be one of {b', '.join(_METHODS).decode()}", 501)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("this server speaks HTTP/1.1", 505)
    if not all(_HOST.fullmatch(value) for name, value in request.headers if name == b"host"):
        raise h11.RemoteProtocolError("the Host header is not a host", 400)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Returns a request whose target begins with its path: clients that expect a proxy send the whole URL."""
    origin = _ORIGIN.match(request.target)
    if origin is None:
        return request
    target = request.target[origin.end() :]
    return h11.Request(
        method=request.method,
        headers=list(request.headers.raw_items()),
        target=target if target.startswith(b"/") else b"/" + target,
        http_version=request.http_version,
    )
