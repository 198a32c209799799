"""The connection to the broker that every process uses: a `Bus` over nats-py's hardened client.

Two more edges of nats-py are closed here: the client closes for good on a message that is too large, and on a subject
that is empty, too long or contains a space. Both are checked before anything is written.
"""

import asyncio
import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from tokenbus.protocol import late_logger, tasks
from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus.bus import BadSubjectError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.handshake import BrokerRefusedError
from tokenbus.protocol.bus.nats_client import OPTIONS, HardenedClient
from tokenbus.protocol.bus.settings import BusSettings as BusSettings
from tokenbus.protocol.bus.settings import redact_url as redact_url
from tokenbus.protocol.wire import limits

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_ERRNO = re.compile(r"(?:Multiple exceptions: )?\[Errno (-?\d+)\] ")
_CONTROL_LINE_REST_BYTES = len(b"HPUB 1000000 1000000\r\n")
_MAX_ADDRESSES = 1_024
"""The number of cached control lines (a stream's chunks all share one): at most 4 MiB."""


class CancellationGuard:
    """A context manager that raises CancelledError at its end if the task was cancelled inside without noticing.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives together with the result, and nats-py
    awaits everything by `wait_for`."""

    def __enter__(self) -> "CancellationGuard":
        self._before = _num_cancellations()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Another exception may hide the cancellation just as a result does.
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            self.check()

    def check(self) -> None:
        """Raises CancelledError if the task has been cancelled since the guard was entered."""
        if _num_cancellations() > self._before:
            raise asyncio.CancelledError


def _num_cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


_is_subject = re.compile(r"\S+").fullmatch


class Connection:
    """A connection that survives the broker, once it is open; bus.py says what it guarantees."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._client = HardenedClient(settings)
        self._client.may_write = lambda: self.guard()
        self._client.on_reconnect_failed = self._reconnect_failed
        self._closed_for_good = asyncio.Event()
        self._last_error = ""
        self.is_closing = False
        self.reconnected_at = -math.inf
        self.on_permissions_violation: Callable[[str], None] = lambda words: None
        self.on_reconnect: Callable[[], None] = lambda: None
        self.guard: Callable[[], bool] = lambda: True
        self._before_resume: Callable[[], Awaitable[None]] | None = None
        self._resuming: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Connection {self._settings.redacted_url} {'up' if self.is_connected else 'down'}>"

    @property
    def _log(self) -> "FilteringBoundLogger":
        return late_logger.get_logger().bind(nats=self._name)

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected and not self._client.is_held

    @property
    def before_resume(self) -> Callable[[], Awaitable[None]] | None:
        return self._before_resume

    @before_resume.setter
    def before_resume(self, before_resume: Callable[[], Awaitable[None]] | None) -> None:
        self._before_resume, self._client.holds_back = before_resume, before_resume is not None

    @property
    def last_received_at(self) -> float:
        return self._client.last_received_at

    @property
    def confirmed_at(self) -> float:
        return self._client.confirmed_at

    @property
    def network(self) -> str:
        return self._client.network

    @property
    def broker_id(self) -> str:
        return self._client.broker_id

    @property
    def num_writes(self) -> int:
        return self._client.num_writes

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    async def open(self) -> None:
        """Connects, retrying for `connect_timeout_s`. After that the connection reconnects by itself.

        Raises ValueError for invalid settings, ConnectionError, which says what to do, if the broker can't be reached,
        and its subclass BrokerRefusedError, at once, if the broker does not accept this process."""
        client, settings = self._client, self._settings
        settings.check()
        for path in settings.world_readable_files:
            late_logger.get_logger().warning("secret_exposed", nats=self._name, path=path)
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                with CancellationGuard() as cancellation:
                    await client.connect(
                        name=self._name,
                        error_cb=functools.partial(_raise_refusals, cancellation),
                        disconnected_cb=self._disconnected,
                        reconnected_cb=self._reconnected,
                        closed_cb=self._closed,
                        pending_size=settings.max_pending_bytes,
                        inbox_prefix=settings.inbox_prefix,
                        **settings.server_options,
                        **OPTIONS,
                    )
        except BaseException as error:
            self.is_closing = True
            with contextlib.suppress(Exception):  # the reason is already known, whatever a half-open client raises
                await client.close()
            if isinstance(error, TimeoutError | OSError | nats.errors.Error):
                raise connect_error(
                    settings, error, str(client.last_error or "no answer"), is_there=client.asks_who_connects
                ) from error
            raise
        client._error_cb = self._error  # from now on errors are only reported

    def ping(self) -> None:
        if self.is_connected:
            self._client.ping()

    def ask(self, subject: str, reply: str) -> None:
        if self._client.is_connected:
            self._client.enqueue_unheld(self._to_command(subject, b"", reply, None))

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self._require_room()
        self._client.enqueue(self._to_command(subject, payload, reply, headers))

    def publish_all(self, messages: Sequence[bus.Outgoing]) -> None:
        self._require_room()
        commands, max_payload = [], self._client.max_payload
        for one in messages:
            payload = one.payload
            try:
                if one.headers is None and len(payload) <= max_payload:  # nearly always
                    address = _to_address(one.subject, one.reply)
                    commands.append(b"PUB %b%d\r\n%b\r\n" % (address, len(payload), payload))
                else:
                    commands.append(self._to_command(one.subject, payload, one.reply, one.headers))
            except BadSubjectError as error:
                self._log.error("nats_error", error=str(error))
        self._client.enqueue(b"".join(commands))

    def _require_room(self) -> None:
        if self._client.is_closed:
            raise ConnectionError("the connection to the broker is closed")
        waiting_bytes = self._client.waiting_bytes
        if waiting_bytes > self._settings.max_pending_bytes:
            raise OutboundBufferLimitError(f"{waiting_bytes} bytes are waiting for the broker")

    def _to_command(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> bytes:
        """Returns the command that publishes a message. Raises BadSubjectError, PayloadTooLargeError."""
        header = _header_block(headers) if headers else b""
        num_bytes = len(header) + len(payload)
        max_payload = self._client.max_payload
        if num_bytes > max_payload:
            raise PayloadTooLargeError(f"{num_bytes} bytes are more than the broker's {max_payload}")
        address = _to_address(subject, reply)
        if headers:
            return b"HPUB %b%d %d\r\n%b%b\r\n" % (address, len(header), num_bytes, header, payload)
        return b"PUB %b%d\r\n%b\r\n" % (address, num_bytes, payload)

    async def subscribe(self, subject: str, callback: bus.Callback, queue: str = "") -> Subscription:
        def deliver(message: Msg) -> None:
            try:
                callback(message)
            except Exception:  # outermost frame of a message's handling: the read loop must continue
                self._log.exception("message_failed", subject=message.subject)

        # The id is needed before nats-py can read a first message for it.
        number = self._client._sid + 1
        self._client.callbacks[number] = deliver
        subscription = await self._client.subscribe(subject, queue=queue)
        assert subscription._id == number, (subscription._id, number)
        return subscription

    async def unsubscribe(self, subscription: bus.Subscription) -> None:
        assert isinstance(subscription, Subscription)
        with contextlib.suppress(nats.errors.Error, TimeoutError), CancellationGuard():
            if self.is_connected:
                await subscription.drain()  # type: ignore[no-untyped-call]
            else:  # nothing more can arrive, and draining would wait for the broker's answer
                await subscription.unsubscribe()
        self._client.callbacks.pop(subscription._id, None)

    async def flush(self, timeout_s: float = 5.0) -> None:
        if not self.is_connected:  # nats-py's flush would return at once
            raise ConnectionError("the broker can't be reached")
        if self._client.is_stalled:
            raise ConnectionError("the connection has stopped reading or writing")
        try:
            with CancellationGuard():
                await self._client.flush(timeout=cast(int, timeout_s))
        except nats.errors.FlushTimeoutError as error:
            raise TimeoutError(f"the broker did not answer within {timeout_s} s") from error
        except nats.errors.Error as error:
            raise ConnectionError(f"the broker can't be reached: {error}") from error

    async def wait_closed(self) -> None:
        await self._closed_for_good.wait()
        raise ConnectionError("the broker has closed the connection for good; its log says why")

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def jetstream(self, timeout_s: float) -> JetStreamContext:
        """Returns nats-py's means to use the broker's JetStream, if it has one."""
        return JetStreamContext(self._client, timeout=timeout_s)

    def abort(self) -> None:
        self._client.abort()

    async def close(self) -> None:
        self.is_closing = True
        if self._resuming is not None:
            self._resuming.cancel()
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await self.flush(timeout_s=2.0)
        self._client.discard_pending()
        with CancellationGuard():
            await self._client.close()

    # nats-py's callbacks. They must not raise: an exception would end the task that calls them.

    async def _error(self, error: Exception) -> None:
        words = str(error) or type(error).__name__
        if self.is_connected or words != self._last_error:  # each attempt to reconnect fails for the same reason
            self._log.warning("nats_error", error=words)
        self._last_error = words
        if "permissions violation" in words.lower():
            self._call(lambda: self.on_permissions_violation(words), "denied")

    async def _disconnected(self) -> None:
        self.reconnected_at = math.inf
        if self._resuming is not None:
            self._resuming.cancel()
        if not self.is_closing:
            self._log.warning("nats_disconnected")

    async def _reconnected(self) -> None:
        if self._before_resume is None:
            self._resumed()
            return
        self._resuming = tasks.background("resume", self._resume(self._before_resume))

    async def _resume(self, before_resume: Callable[[], Awaitable[None]]) -> None:
        await before_resume()
        if self._client.is_held:
            self._client.release()
            self._resumed()

    def _resumed(self) -> None:
        self.reconnected_at, self._last_error = time.monotonic(), ""
        self._log.info("nats_reconnected")
        self._call(self.on_reconnect, "reconnect")

    async def _closed(self) -> None:
        if not self.is_closing:
            self._log.error("nats_closed", error=str(self._client.last_error))
            self._closed_for_good.set()

    def _reconnect_failed(self, error: Exception) -> None:
        self._log.error("nats_closed", error=repr(error), exc_info=error)
        self._closed_for_good.set()

    def _call(self, callback: Callable[[], None], subject: str) -> None:
        try:
            callback()
        except Exception:  # outermost frame of a callback
            self._log.exception("message_failed", subject=subject)


async def connect(settings: BusSettings, name: str) -> Connection:
    """Returns an open connection; `Connection.open` says what it raises."""
    connection = Connection(settings, name)
    await connection.open()
    return connection


def connect_error(
    settings: BusSettings, error: Exception, otherwise: str, *, is_there: bool = False
) -> ConnectionError:
    """Describes the failure of a first connect in a sentence; `otherwise` is the reason if the error has no text, and
    `is_there` says that a broker has asked who connects."""
    if isinstance(error, BrokerRefusedError):
        return BrokerRefusedError(f"the NATS broker at {settings.redacted_url} {error}")
    reason = str(error) or otherwise
    if found := _ERRNO.match(reason):  # the system's text, without the addresses that were tried
        reason = os.strerror(int(found[1])) if int(found[1]) > 0 else reason[found.end() :]
    where = f"{settings.redacted_url} within {settings.connect_timeout_s:g} s"
    if is_there:
        remedy = "if clients show API keys there, is `tokenbus auth` running?"
        return ConnectionError(f"the NATS broker does not let this process in at {where} ({reason}): {remedy}")
    remedy = "start one, or set --nats or TOKENBUS_NATS to its address"
    return ConnectionError(f"no NATS broker at {where} ({reason}): {remedy}")


async def _raise_refusals(cancellation: CancellationGuard, error: Exception) -> None:
    """Ends the first connect if the broker refuses this process or the task was cancelled; `open` reports the rest."""
    cancellation.check()
    if isinstance(error, BrokerRefusedError):
        raise error


@functools.lru_cache(_MAX_ADDRESSES)
def _to_address(subject: str, reply: str) -> bytes:
    """Returns the beginning of a command's control line: the destination of a message. Raises BadSubjectError."""
    if not _is_subject(subject) or (reply and not _is_subject(reply)):
        raise BadSubjectError(f"{subject[:200]!r} or its reply subject {reply[:200]!r} is not a valid subject")
    address = f"{subject} {reply} ".encode()
    if len(address) + _CONTROL_LINE_REST_BYTES > limits.MAX_CONTROL_LINE_BYTES:
        raise BadSubjectError(f"{subject[:200]!r} and its reply subject are longer than the broker allows")
    return address


def _header_block(headers: dict[str, str]) -> bytes:
    # A line break in a value would let the sender inject a header or a command.
    lines = "".join(f"{name}: {' '.join(value.split())}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()
