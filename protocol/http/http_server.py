"""The HTTP server of every process: uvicorn's, with limits on what anyone who reaches its port can consume.

A connection is in one of three states:

    idle --the head of a request is complete--> busy --response is complete--> idle
    idle or busy --refused, evicted or too slow--> closing

An idle connection has a deadline (`Timeouts`): for the rest of the head once part of a request has arrived, else
for the next request. When there are too many connections, the longest idle one is evicted (`connection_table.py`). A
closing connection accepts no more requests, and lingers until its client has read the last response (decision 0031).

A client that has shut down its sending side may still read: its connection stays open until it has its responses. One
that has closed the connection looks the same, except that its machine answers anything sent with a reset. So it is sent
a filler that clients ignore, twice within 50 ms and then less and less often. HTTP/1.0 has no such filler; its clients
count as gone.

Independently of all that, a response that is not read has a deadline too: here for a client that reads too little and,
if the listening socket sets TCP_USER_TIMEOUT, in the kernel for one that reads nothing. The application decides how
long a request's body may take."""

import asyncio
import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from tokenbus.protocol.http import refusals
from tokenbus.protocol.http.connection_table import ConnectionLimits, ConnectionTable, client_address
from tokenbus.protocol.http.http_parser import MAX_HEAD_BYTES, HttpParser
from tokenbus.protocol.http.refusals import Headers, HttpRefusal, Reason, plain_text_response

_DISCONNECT = "tokenbus.disconnect"
_MAX_REFUSED = 64
"""Refused connections that may be sent a response at the same time; any more are simply closed."""
_MIN_READ_BYTES = 16 * 1024
"""A client that reads less than this before the deadline counts as gone."""
_FIRST_PROBE_S, _MAX_PROBE_S = 0.05, 10.0
"""The first interval between probes of a client that sends nothing more; it doubles."""


class Disconnect(enum.StrEnum):
    """The ways in which a connection ends before its response is complete."""

    GONE = "gone"
    """The client has closed it."""
    SLOW = "slow"
    """For too long little or nothing could be written to it: the client does not read, or its machine does not
    answer."""


def disconnect_of(scope: Scope) -> Disconnect | None:
    """Returns how the connection of a request ended, or None if its response was complete or it is still open."""
    disconnect: Disconnect | None = scope.get(_DISCONNECT)
    return disconnect


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The times that a server waits for its clients."""

    head_s: float = 10.0
    """For a complete head, from its first byte; for the first request of a connection, from the connection's start."""
    keep_alive_s: float = 30.0
    """For the first byte of another request."""
    slow_reader_s: float = 30.0
    """For a client to read more of a response that exceeds the buffers."""
    linger_s: float = 2.0
    """For a client to read why it was refused: it may still be sending, and would not get to read it if the connection
    were cut."""


DEFAULT_TIMEOUTS = Timeouts()


class ServerConfig(uvicorn.Config):
    """The configuration of a server, and the state that its connections share."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        *,
        refusal_response: Callable[[HttpRefusal, str], tuple[int, Headers, bytes]] = plain_text_response,
        on_closed: Callable[[Reason, str], None] = lambda reason, address: None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        grace_s: int = 1,
    ) -> None:
        """`refusal_response` makes the status, headers and body of a refusal, given the request's path (empty if not
        received yet). `on_closed` is called with the reason and address of each connection that the server closes. On
        shutdown open connections have `grace_s`."""
        super().__init__(
            app,
            http=HttpConnection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # our log has its own lines for each request
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=grace_s,
        )
        self.open_connections: ConnectionTable[HttpConnection] = ConnectionTable(limits)
        self.refused: set[HttpConnection] = set()
        self.refusal_response = refusal_response
        self.on_closed = on_closed
        self.timeouts = timeouts


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its process: uvicorn's handlers would end the process before its work is
    done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Deadline:
    """At most one pending timeout, for one purpose."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._purpose = ""

    def start(self, purpose: str, delay_s: float, expire: Callable[[], None]) -> None:
        """Starts a timeout, replacing a pending one unless that has the same purpose: then it keeps running."""
        if self._timer is None or purpose != self._purpose:
            self.cancel()
            self._purpose = purpose
            self._timer = self._loop.call_later(delay_s, self._expire, expire)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, expire: Callable[[], None]) -> None:
        self._timer = None
        expire()


class HttpConnection(H11Protocol):
    """One connection, from accept to close."""

    config: ServerConfig
    conn: HttpParser

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = HttpParser()
        self._address = ""
        self._deadline = _Deadline(self.loop)
        self._reader_deadline = _Deadline(self.loop)
        self._probe_deadline = _Deadline(self.loop)
        self._is_half_closed = False
        self._is_busy = False
        self._is_closing = False
        self._reads_too_little = False

    def __repr__(self) -> str:
        return f"<HttpConnection of {self._address or 'nobody'}, {'busy' if self._is_busy else 'idle'}>"

    # Overrides, which uvicorn calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = client_address(self.client[0] if self.client else "")
        outcome = self.config.open_connections.add(self, self._address)
        if isinstance(outcome, HttpRefusal):
            self._turn_away(outcome)
            return
        self._wait_for_request(has_begun=True)
        if outcome is not None:  # already removed from the table
            outcome.evict()

    def data_received(self, data: bytes) -> None:
        if not self._is_closing and not self.transport.is_closing():
            super().data_received(data)
            self._update_state()
            self._listen_for_the_end()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open for its responses."""
        is_answering = self._is_busy and self.conn.is_request_complete
        self._is_half_closed = is_answering and not self._is_closing and not self.conn.is_http_1_0
        if self._is_half_closed:
            self._probe(_FIRST_PROBE_S)
        return self._is_half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_state()

    def send_400_response(self, msg: str) -> None:
        """Answers input that the parser has rejected."""
        refusal = refusals.malformed(self.conn.status, self.conn.problem)
        self.config.on_closed(refusal.reason, self._address)
        self._refuse(refusal)

    def timeout_keep_alive_handler(self) -> None:
        """Does nothing: this class sets the deadlines of idle connections itself."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_deadline.cancel()

    def shutdown(self) -> None:
        if self._is_closing:
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        is_slow = self._reads_too_little or isinstance(exc, TimeoutError)  # the kernel's deadline shows as a timeout
        if is_slow:
            self.config.on_closed(Reason.SLOW_READER, self._address)
        if self.cycle is not None and not self.cycle.response_complete:
            # before uvicorn tells the application of the disconnect
            cast(Scope, self.scope)[_DISCONNECT] = Disconnect.SLOW if is_slow else Disconnect.GONE
        super().connection_lost(exc)
        self.config.open_connections.remove(self)
        self.config.refused.discard(self)
        for deadline in (self._deadline, self._reader_deadline, self._probe_deadline):
            deadline.cancel()

    # From idle to busy and back.

    def _update_state(self) -> None:
        if self._is_closing:
            return
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if self._is_half_closed and not (is_busy and self.conn.is_request_complete):
            self.transport.close()  # no further request will arrive, nor the rest of one
            return
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._deadline.cancel()
            table = self.config.open_connections
            (table.mark_busy if is_busy else table.mark_idle)(self)
        if not is_busy:
            # Also called for each piece of a head: the first one changes the deadline, later ones don't extend it.
            self._wait_for_request(has_begun=self.cycle is None or self.conn.has_begun)

    def _listen_for_the_end(self) -> None:
        """Keeps reading while a request is served, or a disconnect would go unnoticed.

        uvicorn stops at the first byte of the next request. That request is buffered, within bounds, until its turn."""
        if self.conn.is_request_complete and len(self.conn.trailing_data[0]) <= MAX_HEAD_BYTES:
            self.flow.resume_reading()

    def _probe(self, next_s: float) -> None:
        """Finds out whether a client that sends nothing more still reads: sending to a closed connection makes the next
        send fail."""
        filler = self.conn.send_filler()
        if filler and not self.transport.is_closing():
            self.transport.write(filler)
        self._probe_deadline.start("probe", next_s, functools.partial(self._probe, min(2 * next_s, _MAX_PROBE_S)))

    def _wait_for_request(self, *, has_begun: bool) -> None:
        timeouts = self.config.timeouts
        if has_begun:
            self._deadline.start("head", timeouts.head_s, self._expire)
        else:
            self._deadline.start("keep-alive", timeouts.keep_alive_s, self._expire)

    def _expire(self) -> None:
        if self.flow.write_paused:  # the client still reads its last response, which has a deadline of its own
            self._wait_for_request(has_begun=self.conn.has_begun)
            return
        if self.conn.has_begun:
            self.config.on_closed(Reason.SLOW_HEAD, self._address)
        self._close_idle(refusals.SLOW_HEAD)

    # To closing.

    def evict(self) -> None:
        """Closes this connection, which is idle, to make room for another."""
        self.config.on_closed(Reason.EVICTED, self._address)
        self._close_idle(refusals.EVICTED)

    def _close_idle(self, refusal: HttpRefusal) -> None:
        """Closes an idle connection, with a response if part of a request has come."""
        # A client that has sent nothing would take the response for the one to its next request.
        if self.conn.has_begun and self.conn.our_state is h11.IDLE:
            self._write(refusal)
        self._close()

    def _turn_away(self, refusal: HttpRefusal) -> None:
        self.config.on_closed(refusal.reason, self._address)
        if len(self.config.refused) < _MAX_REFUSED:
            self.config.refused.add(self)
            self._refuse(refusal)
        else:
            self._is_closing = True  # a flood: not even worth a response
            self.transport.abort()

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Sends a refusal and closes. If a response has already begun, it is cut off instead."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._close()
            return
        self._write(refusal)
        # Only the write side is closed: closing a socket with unread data would reset it before the client has read the
        # response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _write(self, refusal: HttpRefusal) -> None:
        self._is_closing = True
        if self.cycle is not None:  # the application may be waiting for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        status, headers, body = self.config.refusal_response(refusal, self.conn.path)
        headers = [*self.server_state.default_headers, *headers, (b"content-length", b"%d" % len(body))]
        response = h11.Response(
            status_code=status,
            headers=[*headers, (b"connection", b"close")],
            reason=STATUS_PHRASES[status],
        )
        for event in (response, h11.Data(data=b"" if self.conn.is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _close(self) -> None:
        """Closes the connection once the client has read what was written, or soon."""
        self._is_closing = True
        self.transport.close()
        self._linger()

    def _linger(self) -> None:
        self._deadline.start("linger", self.config.timeouts.linger_s, self.transport.abort)

    def _watch_reader(self) -> None:
        """Checks from time to time how much of a response the client has read, as long as writing is paused."""
        unread_bytes = self.transport.get_write_buffer_size()
        check = functools.partial(self._check_reader, unread_bytes)
        self._reader_deadline.start("read", self.config.timeouts.slow_reader_s, check)

    def _check_reader(self, unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() <= unread_bytes - _MIN_READ_BYTES:
            self._watch_reader()
        else:
            self._reads_too_little = True
            self.transport.abort()
