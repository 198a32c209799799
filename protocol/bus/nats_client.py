"""nats-py's client, with its gaps while connected closed.

Versions and measurements: docs/decisions/0004-nats-connection.md. handshake.py closes those of the handshake.
- nats-py's PING overtakes queued commands, so a flush is no barrier: here it is queued after them.
- A flush that is cancelled or times out breaks nats-py's read loop: here a PONG without a waiter is dropped.
- A callback that raises ends its subscription's task: here callbacks are plain functions, called by the read loop.
- nats-py's inboxes can be guessed from earlier ones: here they are random, so that only the recipient can answer.
- nats-py's `publish` is a coroutine: here it is a plain call, and one turn of the event loop is one write.
- nats-py wakes a task for each arrival and another for each write: here both are plain calls (message_reader.py).
- nats-py has no way to cut a connection at once: here `abort` does, and `may_write` is called before every write.
- nats-py writes what was queued as soon as a new connection is made: here it is held back until `release`, because a
  worker must first ask whether its epoch is still in force.
- nats-py writes at once after its process has stood still. If the broker has closed the connection by then, that makes
  the kernel discard what is unread: here everything is read first.
- nats-py may retry the server that it has just lost, and never forgets one that has left the cluster.
- nats-py stays with a server in lame duck mode until that server cuts the connection, and loses what is in flight then:
  here the client moves to another server, and loses nothing that it has published.
"""

import asyncio
import contextlib
import random
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import nats.errors
from nats.aio.client import Srv
from nats.aio.transport import TcpTransport

from tokenbus.protocol import tasks
from tokenbus.protocol.bus import bus, handshake
from tokenbus.protocol.bus.message_reader import MessageReader
from tokenbus.protocol.bus.settings import BusSettings

if sys.platform == "linux":
    import fcntl
    import termios

_PING = b"PING\r\n"
_NO_LINGER = struct.pack("ii", 1, 0)
"""Makes closing a socket discard its unsent data."""
MAX_MOVE_DELAY_S = 1.0
"""A client that is told to leave waits up to this long, so that routers do not all leave at once. Servers give their
clients ten seconds, unless configured otherwise."""
_MOVE_TIMEOUT_S = 0.5
"""Time for the old server's last answer: less than a frontend's fence allows."""
_STANDSTILL_S = 1.0
"""If nothing was received for this long, this process may have stood still."""
_MUCH_BYTES = 32_768
"""The buffers of two kernels hold more, and whatever they can't hold keeps the end of the connection back."""
_UNREAD = struct.Struct("i")
_MORE_S = 0.05
"""Time in which the kernel of the broker's machine sends what did not fit in the buffer of this one."""
_CATCH_UP_S = 1.0
"""Time for reading all of that. It was sent before the broker gave the connection up, so it is not much."""
OPTIONS: dict[str, Any] = {
    "max_reconnect_attempts": -1,
    "reconnect_time_wait": 0.2,
    "connect_timeout": 2,
    "dont_randomize": True,  # `_attempt_reconnect` orders the servers
    "ping_interval": 2,
    "max_outstanding_pings": 2,
    "skip_subject_validation": True,  # protocol/wire/subjects.py builds all of ours
}
"""Options of `connect`: by default nats-py gives up after two minutes and notices a dead broker only after six."""


class _PingMarker:
    """Stands among nats-py's futures for a PING without a waiter, and remembers when it was sent."""

    def __init__(self) -> None:
        self.sent_at = bus.lease_time()

    def done(self) -> bool:
        return True


class _RandomNuid:
    """Makes inbox names. nats-py increments its own by a fixed step, so two of them reveal all later ones."""

    def next(self) -> bytearray:
        return bytearray(secrets.token_hex(11), "ascii")


class HardenedClient(handshake.HandshakeClient):
    """nats-py's client as `Connection` needs it."""

    def __init__(self, settings: BusSettings) -> None:
        super().__init__(settings)
        self._nuid = _RandomNuid()  # type: ignore[assignment]
        self.may_write: Callable[[], bool] = lambda: True
        self.last_received_at = time.monotonic()
        self._may_be_behind = False
        """Whether something may be unread that came while this process stood still."""
        self.confirmed_at = bus.lease_time()
        self.num_writes = 0
        self.callbacks: dict[int, bus.Callback] = {}
        """By subscription id. Called by the read loop, so that messages keep their order across all subscriptions."""
        self.on_reconnect_failed: Callable[[Exception], None] = lambda error: None
        """Called when the client has stopped trying to reconnect."""
        self._reader: MessageReader | None = None
        self._writes_soon = False
        """Whether `_write_soon` is to be called in this turn of the event loop."""
        self._moving: asyncio.Task[None] | None = None
        self._held: list[bytes] | None = None
        """Commands that wait for `release` after a reconnect; None while everything is written at once."""
        self._held_size = 0
        self.holds_back = False
        """Whether what is queued is held back after a reconnect."""

    @property
    def is_held(self) -> bool:
        """Whether the connection was made again, but `release` has not been called yet."""
        return self._held is not None

    @property
    def waiting_bytes(self) -> int:
        """The bytes that are queued or held back."""
        return self._pending_data_size + self._held_size

    @property
    def is_stalled(self) -> bool:
        """Whether nats-py has stopped reading or writing although it claims to be connected."""
        return any(task is None or task.done() for task in (self._reading_task, self._flusher_task))

    @property
    def network(self) -> str:
        """The name of the server's cluster, or its own id."""
        return str(self._server_info.get("cluster") or self._server_info.get("server_id", ""))

    @property
    def broker_id(self) -> str:
        """The server's id, which is another one after it has been started again."""
        return str(self._server_info.get("server_id", ""))

    def ping(self) -> None:
        """Sends a PING after everything queued; its answer advances `confirmed_at`."""
        # nats-py resolves these futures in order, one for each PONG that arrives.
        self._pongs.append(cast(Any, _PingMarker()))
        self.enqueue(_PING)

    def enqueue(self, command: bytes) -> None:
        """Queues a command, which is written with everything else queued in this turn of the event loop."""
        if self._held is not None:
            self._held.append(command)
            self._held_size += len(command)
        else:
            self.enqueue_unheld(command)

    def enqueue_unheld(self, command: bytes) -> None:
        """Queues a command that is written even before `release`."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        self._write_later()

    def release(self) -> None:
        """Lets everything be written that has been held back since the reconnect. Safe to call again."""
        if self._held is not None:
            self._pending += self._held
            self._pending_data_size += self._held_size
            self._held, self._held_size = None, 0
            self._write_later()

    def _write_later(self) -> None:
        if self.is_connected and not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_soon)

    def _write_soon(self) -> None:
        """Writes what is queued if nothing must be waited for; otherwise the flusher does."""
        self._writes_soon = False
        if not self._pending or not self.is_connected:
            return
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is None or writer.transport.get_write_buffer_size() or self._is_behind_perhaps:
            self._wake_flusher()
        elif self.may_write():
            self._write()
        else:
            self.abort()

    @property
    def _is_behind_perhaps(self) -> bool:
        return self._may_be_behind or time.monotonic() - self.last_received_at >= _STANDSTILL_S

    def _wake_flusher(self) -> None:
        queue = self._flush_queue
        # One entry in the queue is enough: the flusher writes everything that is pending.
        if self.is_connected and queue is not None and queue.empty():
            queue.put_nowait(asyncio.get_running_loop().create_future())

    def discard_pending(self) -> None:
        """Discards what could not be sent: on close nats-py would write it to a dead transport, and fail."""
        if not self.is_connected:
            self._pending.clear()
            self._pending_data_size = 0
            self._held, self._held_size = None, 0

    def abort(self) -> None:
        """Cuts the connection, so that nothing more reaches the broker over it, and starts to reconnect."""
        self._pending, self._pending_data_size = [], 0
        self._held, self._held_size = None, 0
        self._stop_reading()
        if not self.is_connected:
            return
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            stream = self._transport._io_writer.transport
            stream.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            stream.abort()
        # The rest is what nats-py does when it notices a broken connection itself.
        self._status = handshake.HandshakeClient.RECONNECTING
        self._ps.reset()
        if self._reconnection_task is not None:
            self._reconnection_task.cancel()
        self._reconnection_task = tasks.background("reconnect", self._attempt_reconnect())

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    async def _attempt_reconnect(self) -> None:
        self._stop_reading()
        # The lost server comes last: it may be frozen and accept connections without answering.
        others = [server for server in self._server_pool if server is not self._current_server]
        self._server_pool[:] = [*random.sample(others, len(others)), cast(Srv, self._current_server)]
        try:
            await super()._attempt_reconnect()
        except Exception as error:  # outermost frame of a task, which nats-py starts too: nothing else would retry
            self.on_reconnect_failed(error)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        # Trying a server that no longer exists may take longer than a frontend has before it fences itself off.
        if listed := info.get("connect_urls"):
            keep = (self._current_server, *(one for one in self._server_pool if one.uri.netloc in listed))
            self._server_pool[:] = [one for one in self._server_pool if not one.discovered or one in keep]
        is_asked_to_go = info.get("ldm", False) and not initial_connection
        if is_asked_to_go and len(self._server_pool) > 1 and (self._moving is None or self._moving.done()):
            self._moving = tasks.background("move to another server", self._move())

    async def _move(self) -> None:
        """Moves to another server, once this one has received everything written to it."""
        reading = self._reading_task
        await asyncio.sleep(random.uniform(0, MAX_MOVE_DELAY_S))
        with contextlib.suppress(nats.errors.Error):
            await self.flush(cast(int, _MOVE_TIMEOUT_S))
        if self._reading_task is reading:
            await self.force_reconnect()

    async def close(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        self._stop_reading()
        await super().close()

    async def _process_connect_init(self) -> None:
        began_at, holds_back = bus.lease_time(), self.holds_back and self.is_reconnecting
        await super()._process_connect_init()
        self.confirmed_at = began_at  # the handshake ends with a PING and its answer
        if isinstance(self._transport, TcpTransport) and self._transport._io_reader is not None:
            self._reader = MessageReader(self._transport._io_reader, self._take)
        # A PING queued on the last connection would be answered on this one, and its answer taken for a later PING's.
        waiting = [command for command in (*(self._held or ()), *self._pending) if command is not _PING]
        self._held, self._pending = (waiting, []) if holds_back else (None, waiting)
        self._held_size, self._pending_data_size = sum(map(len, self._held or ())), sum(map(len, self._pending))

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._pending.append(_PING)
        self._pending_data_size += len(_PING)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        self._received()
        # nats-py would set a result on a future that is done (one of ours, or a cancelled flush's) and stop reading.
        if self._pongs and self._pongs[0].done():
            answered = self._pongs.pop(0)
            if isinstance(answered, _PingMarker):
                self.confirmed_at = answered.sent_at
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    def _take(self, sid: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> bool:
        callback = self.callbacks.get(sid)
        if callback is None:
            return False
        self._received()
        try:
            message = self._build_message(sid, subject, reply, data, self._parsed(headers) if headers else None)
        except (ValueError, LookupError):
            return False
        callback(message)
        return True

    def _parsed(self, headers: bytes) -> dict[str, str] | None:
        """Returns the headers as nats-py understands them. Its function is a coroutine, but waits for nothing."""
        parsing = self._process_headers(headers)
        try:
            parsing.send(None)
        except StopIteration as done:
            return cast("dict[str, str] | None", done.value)
        raise RuntimeError("nats-py waits for something while it reads headers")

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Drops a message whose subject or headers can't be decoded: it would end nats-py's read loop."""
        self._received()
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (ValueError, LookupError) as error:
            await self._error_cb(error)

    def _received(self) -> None:
        now = time.monotonic()
        self._may_be_behind |= now - self.last_received_at >= _STANDSTILL_S
        self.last_received_at = now

    async def _catch_up(self) -> None:
        """Reads what has arrived while this process stood still, such as requests that nobody else has.

        After it comes the end of the connection, if the broker has given that up, and with it this ends."""
        self._may_be_behind = False
        until = time.monotonic() + _CATCH_UP_S
        while self._is_behind() and time.monotonic() < until:  # noqa: ASYNC110 (nothing tells when a buffer is empty)
            await asyncio.sleep(_MORE_S)

    def _is_behind(self) -> bool:
        """Whether the broker has closed the connection, or so much is unread that it could not yet say so."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is None or sys.platform != "linux":
            return False
        connected = writer.get_extra_info("socket")
        poll = select.poll()
        poll.register(connected, select.POLLRDHUP)
        size = fcntl.ioctl(connected, termios.FIONREAD, bytes(_UNREAD.size))
        return bool(poll.poll(0)) or _UNREAD.unpack(size)[0] >= _MUCH_BYTES

    async def _flusher(self) -> None:
        """Does what nats-py's does, but first reads what has long been unread, and calls `may_write`."""
        queue = self._flush_queue
        assert queue is not None
        while self.is_connected:
            done: asyncio.Future[Any] = await queue.get()
            try:
                if self._is_behind_perhaps:
                    await self._catch_up()
                if self._pending_data_size > 0 and not self.may_write():
                    self.abort()
                    return
                await self._write_pending()
            except OSError as error:
                await self._process_op_err(error)
                return
            finally:
                if not done.done():
                    done.set_result(None)

    async def _write_pending(self) -> None:
        if self._transport is not None and self._pending:
            self._write()
            await self._transport.drain()  # type: ignore[no-untyped-call]

    def _write(self) -> None:
        assert self._transport is not None
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        self.num_writes += 1
        self._transport.writelines(pending)
