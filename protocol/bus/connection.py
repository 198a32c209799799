"""The hardened NATS connection that every process uses.

nats-py leaves some edges open (versions and measurements: docs/decisions/0004-nats-connection.md). Closed here:
- its PING overtakes queued commands, so that a flush is no barrier: ours waits behind them;
- a flush that is cancelled or times out poisons the read loop: a PONG for nobody is dropped here;
- a callback that raises ends the loop it runs in: callbacks are plain functions here, and what they raise is logged;
- an oversized message closes the client for good, and so does a subject that is too long, empty or has a space in it:
  both are checked before anything is written;
- its inboxes can be guessed from earlier ones: ours can't, so that only who was asked can answer;
- publishing costs a coroutine a message: `publish` is a plain call here, and one loop turn is one write.
"""

import asyncio
import contextlib
import dataclasses
import functools
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, cast

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol import command

from tokenbus.protocol.bus import bus, clock, handshake
from tokenbus.protocol.bus.bus import BadSubjectError, NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.cancellation import CancellationGuard
from tokenbus.protocol.bus.credentials import Credentials, is_world_readable
from tokenbus.protocol.bus.handshake import BrokerRefusedError
from tokenbus.protocol.bus.tls import Tls
from tokenbus.protocol.wire import limits

_PING = b"PING\r\n"
_NO_LINGER = struct.pack("ii", 1, 0)
"""What is still to be sent when such a socket closes is never sent."""
_is_subject = re.compile(r"\S+").fullmatch
_CLIENT_OPTIONS: dict[str, Any] = {
    "max_reconnect_attempts": -1,
    "reconnect_time_wait": 0.2,
    "connect_timeout": 2,
    "ping_interval": 2,
    "max_outstanding_pings": 2,
    "skip_subject_validation": True,  # ours are built in one place (protocol/wire/subjects.py)
}
"""For nats-py, whose defaults give up after two minutes and find a dead peer after six."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to reach the broker."""

    url: str = dataclasses.field(default="nats://127.0.0.1:4222", repr=False)
    """May hold a user and a password, or a token: `redacted_url` is for showing."""
    inbox_prefix: str = "_INBOX"
    """What the process's own reply subjects begin with."""
    credentials: Credentials = dataclasses.field(default_factory=Credentials)
    tls: Tls = dataclasses.field(default_factory=Tls)
    connect_timeout_s: float = 10.0
    """How long the first connect may take, retries included; later ones are retried for ever."""
    max_pending_bytes: int = 32 * 1024 * 1024
    """What may wait for a broker that is slow or away."""

    @property
    def redacted_url(self) -> str:
        """The URL without secrets."""
        return redact_url(self.url)

    @property
    def world_readable_files(self) -> list[str]:
        """Those of the files with secrets that everybody on this machine can read."""
        files = (self.credentials.nkey_file, self.credentials.creds_file, self.tls.key_file or self.tls.cert_file)
        return [path for path in files if path and is_world_readable(path)]

    def check(self) -> None:
        """Raises ValueError for what contradicts itself, and for files that are no good."""
        if "," in self.url:
            raise ValueError("--nats takes one URL; the broker tells of the others of its cluster by itself")
        self.credentials.check()
        if self.tls.is_enabled:
            self.tls.context()


class _PingMarker:
    """Stands among nats-py's futures for a ping that nobody waits for, and remembers when it was sent."""

    def __init__(self) -> None:
        self.sent_at = clock.now()

    def done(self) -> bool:
        return True


class _RandomNuid:
    """Names for inboxes, as long as nats-py takes them to be. Its own are counted up by a fixed step, so that two of
    them tell all that follow."""

    def next(self) -> bytearray:
        return bytearray(secrets.token_hex(11), "ascii")


class HardenedClient(handshake.HandshakeClient):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.url, settings.credentials, settings.tls)
        self._nuid = _RandomNuid()  # type: ignore[assignment]
        self.may_write: Callable[[], bool] = lambda: True
        self.num_undecodable = 0
        self.last_received_at = time.monotonic()
        self.confirmed_at = clock.now()
        self.callbacks: dict[int, bus.Callback] = {}
        """By subscription number: called as the messages are read, so that their order holds over all subscriptions."""

    async def _process_connect_init(self) -> None:
        began_at = clock.now()
        await super()._process_connect_init()
        self.confirmed_at = began_at  # the handshake ends with a ping and its answer
        # A ping of the last connection would be answered on this one, and that answer be taken for a later ping's.
        self._pending = [command for command in self._pending if command is not _PING]
        self._pending_data_size = sum(map(len, self._pending))

    def ping(self) -> None:
        self._pongs.append(cast(Any, _PingMarker()))
        self.enqueue(_PING)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._pending.append(_PING)
        self._pending_data_size += len(_PING)
        await self._flush_pending()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """A message whose subject or headers can't be decoded is dropped: it would end nats-py's read loop."""
        self.last_received_at = time.monotonic()
        try:
            callback = self.callbacks.get(sid)
            if callback is None:
                await super()._process_msg(sid, subject, reply, data, headers)
            else:
                parsed = await self._process_headers(headers)
                callback(self._build_message(sid, subject, reply, data, parsed))
        except (ValueError, LookupError) as error:
            self.num_undecodable += 1
            await self._error_cb(error)

    @property
    def is_stalled(self) -> bool:
        """Whether nats-py has stopped reading or writing although it calls itself connected."""
        loops = (self._reading_task, self._flusher_task)
        return any(task is None or task.done() for task in loops)

    async def _process_pong(self) -> None:
        self.last_received_at = time.monotonic()
        if self._pongs and self._pongs[0].done():
            answered = self._pongs.pop(0)
            if isinstance(answered, _PingMarker):
                self.confirmed_at = answered.sent_at
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _flusher(self) -> None:
        """As nats-py's, but asks before it writes."""
        queue = self._flush_queue
        assert queue is not None
        while self.is_connected:
            done: asyncio.Future[Any] = await queue.get()
            try:
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
        transport, pending = self._transport, self._pending
        if transport is None or not pending:
            return
        self._pending, self._pending_data_size = [], 0
        transport.writelines(pending)
        await transport.drain()  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """Cuts the connection so that nothing more of it reaches the broker, and begins to make it anew."""
        self._pending.clear()
        self._pending_data_size = 0
        if not self.is_connected:
            return
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            stream = self._transport._io_writer.transport
            stream.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            stream.abort()
        self._status = handshake.HandshakeClient.RECONNECTING
        self._ps.reset()
        if self._reconnection_task is not None:
            self._reconnection_task.cancel()
        self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())

    def discard_pending(self) -> None:
        """Forgets what could not be sent: nats-py would write it to a transport that is gone, and fail."""
        if not self.is_connected:
            self._pending.clear()
            self._pending_data_size = 0

    def enqueue(self, pub_command: bytes) -> None:
        self._pending.append(pub_command)
        self._pending_data_size += len(pub_command)
        queue = self._flush_queue
        if self.is_connected and queue is not None and queue.empty():
            queue.put_nowait(asyncio.get_running_loop().create_future())


class Connection:
    """A connection to the broker that survives the broker. Open it with `connect`."""

    def __init__(self, client: HardenedClient, settings: Settings, log: structlog.stdlib.BoundLogger) -> None:
        self._client = client
        self._settings = settings
        self._log = log
        self.is_closing = False
        self.closed_for_good = asyncio.Event()
        self.on_permissions_violation: Callable[[str], None] = lambda words: None
        self.on_reconnect: Callable[[], None] = lambda: None
        """Called after the connection has been made again."""
        self.guard: Callable[[], bool] = lambda: True
        """Asked before anything is written; where it says no the connection is aborted."""
        client.may_write = lambda: self.guard()

    def __repr__(self) -> str:
        return f"<Connection {self._settings.redacted_url} {'up' if self.is_connected else 'down'}>"

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def last_received_at(self) -> float:
        """When something last came from the broker, by `time.monotonic`."""
        return self._client.last_received_at

    @property
    def confirmed_at(self) -> float:
        """When the last ping that the broker has answered was sent, by `protocol.clock`: everything published before
        that has reached the broker."""
        return self._client.confirmed_at

    @property
    def max_payload(self) -> int:
        """Bytes that the broker takes in one message, headers included."""
        return self._client.max_payload

    def ping(self) -> None:
        """Asks the broker for a sign, behind everything published before. While it is away nothing is sent."""
        if self._client.is_connected:
            self._client.ping()

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Sends a message, at the end of this loop turn, together with everything else published in it.

        While the broker is away it waits for it.
        Raises BadSubjectError, PayloadTooLargeError and OutboundBufferLimitError; ConnectionError once closed."""
        client = self._client
        if client.is_closed:
            raise ConnectionError("the connection to the broker is closed")
        header = _header_block(headers) if headers else None
        if len(payload) + (len(header) if header else 0) > client.max_payload:
            raise PayloadTooLargeError(f"{len(payload)} bytes are more than the broker's {client.max_payload}")
        if client.pending_data_size > self._settings.max_pending_bytes:
            raise OutboundBufferLimitError(f"{client.pending_data_size} bytes are waiting for the broker")
        if not _is_subject(subject) or (reply and not _is_subject(reply)):
            raise BadSubjectError(f"{subject[:200]!r} or its reply subject {reply[:200]!r} is no subject")
        with_header = command.hpub_cmd(subject, reply, header, payload) if header else None
        message = with_header or command.pub_cmd(subject, reply, payload)
        if len(message) - len(payload) - len(header or b"") > limits.MAX_CONTROL_LINE_BYTES:
            raise BadSubjectError(f"{subject[:200]!r} and its reply subject are longer than the broker takes")
        client.enqueue(message)

    async def subscribe(self, subject: str, callback: bus.Callback, queue: str = "") -> Subscription:
        """Calls `callback` with each message, in order over all subscriptions of this connection."""

        def deliver(message: Msg) -> None:
            try:
                callback(message)
            except Exception:  # outermost frame of a message's handling: the subscription must go on
                self._log.exception("message_failed", subject=message.subject)

        number = self._client._sid + 1  # before nats-py can read a message for it
        self._client.callbacks[number] = deliver
        subscription = await self._client.subscribe(subject, queue=queue, cb=_unused_callback)
        assert subscription._id == number, (subscription._id, number)
        return subscription

    async def unsubscribe(self, subscription: bus.Subscription) -> None:
        """Ends a subscription after the messages that the broker has already sent for it."""
        assert isinstance(subscription, Subscription)
        with contextlib.suppress(nats.errors.Error, TimeoutError), CancellationGuard():
            await subscription.drain()  # type: ignore[no-untyped-call]
        self._client.callbacks.pop(subscription._id, None)

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """The first reply. Raises NoRespondersError, TimeoutError, PayloadTooLargeError, ConnectionError."""
        if len(payload) + limits.MESSAGE_RESERVE_BYTES > self.max_payload:
            raise PayloadTooLargeError(f"{len(payload)} bytes do not fit the broker's {self.max_payload}")
        try:
            with CancellationGuard():
                return await self._client.request(subject, payload, timeout=timeout_s, headers=headers or None)
        except nats.errors.NoRespondersError as error:
            raise NoRespondersError(subject) from error
        except nats.errors.TimeoutError as error:
            raise TimeoutError(f"no reply on {subject} within {timeout_s} s") from error
        except nats.errors.Error as error:
            raise ConnectionError(f"the broker could not be asked: {error}") from error

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns when the broker has everything that was published before. Raises TimeoutError, ConnectionError."""
        if not self._client.is_connected:  # nats-py's would return at once
            raise ConnectionError("the broker is away")
        if self._client.is_stalled:
            raise ConnectionError("the connection has stopped reading or writing")
        try:
            with CancellationGuard():
                await self._client.flush(timeout=cast(int, timeout_s))
        except nats.errors.FlushTimeoutError as error:
            raise TimeoutError(f"the broker did not answer within {timeout_s} s") from error
        except nats.errors.Error as error:
            raise ConnectionError(f"the broker is away: {error}") from error

    async def wait_closed(self) -> None:
        """Waits for ever, or raises ConnectionError when the broker has closed the connection for good."""
        await self.closed_for_good.wait()
        raise ConnectionError("the broker has closed the connection for good; its log says why")

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def abort(self) -> None:
        """Cuts the connection, throws away what waits to be written, and connects anew."""
        self._client.abort()

    async def close(self) -> None:
        """Writes out what is pending and disconnects. Safe to call twice."""
        self.is_closing = True
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await self.flush(timeout_s=2.0)
        self._client.discard_pending()
        with CancellationGuard():
            await self._client.close()


async def connect(settings: Settings, name: str) -> Connection:
    """Connects, trying again for `connect_timeout_s`; afterwards the connection looks after itself.

    Raises ConnectionError saying what to do when the broker can't be reached, at once the BrokerRefusedError that
    is one when it does not accept this process, and ValueError for settings that are wrong in themselves."""
    log = structlog.get_logger().bind(nats=name)
    settings.check()
    for path in settings.world_readable_files:
        log.warning("secret_exposed", path=path)
    client = HardenedClient(settings)
    connection = Connection(client, settings, log)
    told = _ConnectionCallbacks(connection, client, log)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            with CancellationGuard() as kept:
                await client.connect(
                    settings.url,
                    name=name,
                    error_cb=functools.partial(_raise_refusals, kept),
                    disconnected_cb=told.disconnected,
                    reconnected_cb=told.reconnected,
                    closed_cb=told.closed,
                    pending_size=settings.max_pending_bytes,
                    inbox_prefix=settings.inbox_prefix,
                    user=settings.credentials.user or None,
                    password=settings.credentials.password or None,
                    token=settings.credentials.token or None,
                    **_CLIENT_OPTIONS,
                )
    except BaseException as error:
        connection.is_closing = True
        with contextlib.suppress(Exception):  # whatever a half-made client raises, the reason is already known
            await client.close()
        if isinstance(error, TimeoutError | OSError | nats.errors.Error):
            raise connect_error(settings, error, str(client.last_error or "no answer")) from error
        raise
    client._error_cb = told.error
    return connection


class _ConnectionCallbacks:
    """What nats-py tells of a connection. None of it may raise: that would end the task that tells."""

    def __init__(
        self, connection: Connection, client: HardenedClient, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._connection = connection
        self._client = client
        self._log = log

    async def error(self, error: Exception) -> None:
        words = str(error) or type(error).__name__
        self._log.warning("nats_error", error=words)
        if "permissions violation" in words.lower():
            try:
                self._connection.on_permissions_violation(words)
            except Exception:  # as said above
                self._log.exception("message_failed", subject="denied")

    async def disconnected(self) -> None:
        if not self._connection.is_closing:
            self._log.warning("nats_disconnected")

    async def reconnected(self) -> None:
        self._log.info("nats_reconnected")
        try:
            self._connection.on_reconnect()
        except Exception:  # as said above
            self._log.exception("message_failed", subject="reconnect")

    async def closed(self) -> None:
        if not self._connection.is_closing:
            self._log.error("nats_closed", error=str(self._client.last_error))
            self._connection.closed_for_good.set()


def connect_error(settings: Settings, error: Exception, otherwise: str) -> ConnectionError:
    """What a first connect has ended in, as a sentence; of an error without words the reason is `otherwise`."""
    if isinstance(error, BrokerRefusedError):
        return BrokerRefusedError(f"the NATS broker at {settings.redacted_url} {error}")
    reason = str(error) or otherwise
    return ConnectionError(f"no NATS broker at {settings.redacted_url} ({reason}): start one or pass --nats URL")


def redact_url(url: str) -> str:
    """A broker's URL as it may be shown."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    return scheme + mark + rest.rpartition("@")[2]


async def _unused_callback(message: Msg) -> None:
    """nats-py wants a coroutine for each subscription; ours are called directly."""


async def _raise_refusals(kept: CancellationGuard, error: Exception) -> None:
    """While the first connect is being tried its failures are reported once, by `connect`; a refusal or a cancel ends
    it."""
    kept.check()
    if isinstance(error, BrokerRefusedError):
        raise error


def default_max_request_bytes(max_payload: int) -> int:
    """Half of what the broker takes: the other half is room for what a router adds."""
    return max_payload // 2


def _header_block(headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {' '.join(value.split())}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()
