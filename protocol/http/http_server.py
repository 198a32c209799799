"""The HTTP server of every process: uvicorn's, with a bound on what whoever reaches its port can take of it.

A connection waits for a request or works on one. While it waits a clock runs: for the rest of a request once something
of it has come, else for the next one. Those that wait give way when there are too many (`http_connections`). While an
answer is not read another clock runs. How long a request's body may take is for the application to say."""

import asyncio
import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from tokenbus.protocol.http.connection_table import ConnectionLimits, ConnectionTable, LimitReached, client_address
from tokenbus.protocol.http.http_parser import Parser

_MAX_REFUSED = 64
"""Refused connections that are told why at the same time; the others are closed without a word."""
_LEAST_READ_BYTES = 16 * 1024
"""A reader who takes less while a clock runs counts as gone."""


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long a server waits for its clients."""

    head_s: float = 10.0
    """For a whole head, from its first byte; from a connection's beginning where it is the first."""
    keep_alive_s: float = 30.0
    """For the first byte of another request."""
    slow_reader_s: float = 30.0
    """For a reader to take some of an answer that is too large for the buffers."""
    linger_s: float = 2.0
    """For a client to notice that it was refused: it may be sending still, and would else not read why."""


class Reason(enum.StrEnum):
    """Why a server has ended a connection."""

    MALFORMED = "malformed"
    SLOW_HEAD = "slow_head"
    SLOW_READER = "slow_reader"
    EVICTED = "evicted"
    """It waited for a request, and another came."""
    TOO_MANY_PER_ADDRESS = "too_many_per_address"
    TOO_MANY = "too_many"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An answer to what is no request for the application."""

    status: int
    message: str
    code: str


_LIMIT_REFUSALS = {
    LimitReached.PER_ADDRESS: (
        Reason.TOO_MANY_PER_ADDRESS,
        Refusal(429, "too many connections from this address", LimitReached.PER_ADDRESS),
    ),
    LimitReached.TOTAL: (Reason.TOO_MANY, Refusal(503, "too many connections", LimitReached.TOTAL)),
}
_TOO_SLOW = Refusal(408, "the head of the request did not come in time", "request_timeout")
_EVICTED = Refusal(408, "there are too many connections, and this one has waited longest", "request_timeout")

Headers = list[tuple[bytes, bytes]]


def plain_text_response(refusal: Refusal) -> tuple[Headers, bytes]:
    """Headers and body of a refusal for people."""
    return [(b"content-type", b"text/plain; charset=utf-8")], f"{refusal.message}\n".encode()


class ServerConfig(uvicorn.Config):
    """What the connections of one server share."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        *,
        refusal_response: Callable[[Refusal], tuple[Headers, bytes]] = plain_text_response,
        on_closed: Callable[[Reason, str], None] = lambda reason, address: None,
        timeouts: Timeouts = Timeouts(),
        grace_s: int = 1,
    ) -> None:
        """`refusal_response` makes headers and body of a refusal; `on_closed` is told of each connection that is
        ended, with its
        address; `grace_s` is for open connections when the server is left."""
        super().__init__(
            app,
            http=Connection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # each request has its own lines in our log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=grace_s,
        )
        self.open_connections: ConnectionTable[Connection] = ConnectionTable(limits)
        self.refused: set[Connection] = set()
        self.refusal_response = refusal_response
        self.on_closed = on_closed
        self.timeouts = timeouts


class EmbeddedServer(uvicorn.Server):
    """Leaves the signals to the process: uvicorn's own end it by the signal, before its work is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(H11Protocol):
    """One connection, from its accept to its end."""

    config: ServerConfig
    conn: Parser

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = Parser()
        self._address = ""
        self._clock: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._reader_clock: asyncio.TimerHandle | None = None
        self._is_working = False
        self._is_refused = False

    def __repr__(self) -> str:
        return f"<Connection of {self._address or 'nobody'}, {'working' if self._is_working else 'waiting'}>"

    # what uvicorn calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = client_address(self.client[0] if self.client else "")
        outcome = self.config.open_connections.add(self, self._address)
        if isinstance(outcome, LimitReached):
            self._turn_away(*_LIMIT_REFUSALS[outcome])
            return
        self._set_clock(has_begun=True)
        if outcome is not None:
            outcome.evict()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused and not self.transport.is_closing():
            super().data_received(data)
            self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def send_400_response(self, msg: str) -> None:
        """What has come is not HTTP, or not such as is taken."""
        self._say(Reason.MALFORMED)
        code = "headers_too_large" if self.conn.status == 431 else "invalid_http"
        self._answer(Refusal(self.conn.status, f"this is no request of HTTP: {self.conn.problem}", code))

    def timeout_keep_alive_handler(self) -> None:
        """The clock is set here instead, also while a request comes."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_clock is not None:
            self._reader_clock.cancel()

    def shutdown(self) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.open_connections.remove(self)
        self.config.refused.discard(self)
        for clock in (self._clock, self._reader_clock):
            if clock is not None:
                clock.cancel()

    # what it does by itself

    def evict(self) -> None:
        """Ends it, while it has no request, for another that has come."""
        self._say(Reason.EVICTED)
        self._part(_EVICTED)

    def _note(self) -> None:
        """Sets the clock by what it does now."""
        if self._is_refused:
            return
        is_working = self.cycle is not None and not self.cycle.response_complete
        if is_working != self._is_working:
            self._is_working = is_working
            self._stop_clock()
            books = self.config.open_connections
            (books.mark_busy if is_working else books.mark_idle)(self)
        if not is_working:
            self._set_clock(has_begun=self.cycle is None or self.conn.has_begun)

    def _set_clock(self, *, has_begun: bool) -> None:
        """A clock that runs goes on, unless it is for something else."""
        if self._clock is None or has_begun != self._has_begun:
            self._stop_clock()
            self._has_begun = has_begun
            timeouts = self.config.timeouts
            self._clock = self.loop.call_later(timeouts.head_s if has_begun else timeouts.keep_alive_s, self._expire)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _expire(self) -> None:
        if self.flow.write_paused:  # its last answer is still being read: that has a clock of its own
            self._clock = None
            self._set_clock(has_begun=self._has_begun)
            return
        if self.conn.has_begun:
            self._say(Reason.SLOW_HEAD)
        self._part(_TOO_SLOW)

    def _part(self, refusal: Refusal) -> None:
        """Ends it, with a word where something of a request has come."""
        if self.conn.has_begun and self.conn.our_state is h11.IDLE:
            self._write(refusal)
        self._close()

    def _turn_away(self, reason: Reason, refusal: Refusal) -> None:
        self._say(reason)
        if len(self.config.refused) < _MAX_REFUSED:
            self.config.refused.add(self)
            self._answer(refusal)
        else:
            self._is_refused = True
            self.transport.abort()

    def _answer(self, refusal: Refusal) -> None:
        """Says why, and reads no more requests. Where an answer has begun already it is cut off."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._close()
            return
        self._write(refusal)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_clock()
        self._clock = self.loop.call_later(self.config.timeouts.linger_s, self.transport.abort)

    def _write(self, refusal: Refusal) -> None:
        self._is_refused = True
        if self.cycle is not None:  # the application may be waiting for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers, body = self.config.refusal_response(refusal)
        headers = [*self.server_state.default_headers, *headers, (b"content-length", b"%d" % len(body))]
        response = h11.Response(
            status_code=refusal.status, headers=[*headers, (b"connection", b"close")], reason=_phrase(refusal.status)
        )
        for event in (response, h11.Data(data=b"" if self.conn.is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _close(self) -> None:
        """Ends it when what is written has been taken, or soon."""
        self._is_refused = True
        self._stop_clock()
        self.transport.close()
        self._clock = self.loop.call_later(self.config.timeouts.linger_s, self.transport.abort)

    def _watch_reader(self, unread_bytes: int) -> None:
        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left > unread_bytes - _LEAST_READ_BYTES:
                self._say(Reason.SLOW_READER)
                self.transport.abort()
            else:
                self._watch_reader(left)

        self._reader_clock = self.loop.call_later(self.config.timeouts.slow_reader_s, look)

    def _say(self, reason: Reason) -> None:
        self.config.on_closed(reason, self._address)


def _phrase(status: int) -> bytes:
    return STATUS_PHRASES[status]
