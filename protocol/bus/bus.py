"""The bus as every part of the system sees it: the guarantees of anything that carries messages.

1. Messages that one connection publishes reach another in the order of publishing, over all its subscriptions, at most
   once. Messages from different connections have no order.
2. Messages may be lost, in either direction, only when a connection breaks.
3. Callbacks are plain functions and run one at a time. An exception in one is logged and affects no other.
4. A request to a subject without subscribers fails at once. A message with a reply subject, published to a subject
   without subscribers, is answered on its reply subject with a notice (`is_no_responders`).
5. Nothing blocks: `publish` returns at once, even while the broker is unreachable. The number of queued bytes is
   bounded.
6. `guard` is called before anything is written to the broker. If it returns False, everything queued is discarded and
   the connection is cut and reopened: what was queued never reaches the broker.
7. After a reconnect the subscriptions are in force before anything else is written. With `before_resume`, everything
   else waits for that, and the connection counts as down meanwhile.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from nats.aio.msg import Msg

Callback = Callable[[Msg], None]

_STATUS = "Status"
NO_RESPONDERS = {_STATUS: "503"}
"""The headers of the broker's notice that a subject has no subscribers."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux stops CLOCK_MONOTONIC during a suspend. Elsewhere that clock keeps running, or there is nothing better."""


class PayloadTooLargeError(ValueError):
    """The message is larger than the broker allows; nothing was sent."""


class BadSubjectError(ValueError):
    """The broker would close the connection for this subject or reply subject; nothing was sent."""


class NoRespondersError(LookupError):
    """The subject has no subscribers."""


class OutboundBufferLimitError(RuntimeError):
    """Too many bytes are waiting for the broker; nothing was sent."""


class Outgoing(msgspec.Struct, frozen=True):
    """A message to publish."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


class Subscription(Protocol):
    """The handle that `subscribe` returns and `unsubscribe` takes."""


class Bus(Protocol):
    """A connection to the broker as its users see it; the guarantees are in this module's docstring."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def last_received_at(self) -> float:
        """When something was last received from the broker, by `time.monotonic`."""
        ...

    @property
    def reconnected_at(self) -> float:
        """When the connection was last re-established, by `time.monotonic`: minus infinity if it never was, infinity
        during a reconnect."""
        ...

    @property
    def max_payload(self) -> int:
        """The most bytes that the broker allows in one message, headers included."""
        ...

    @property
    def confirmed_at(self) -> float:
        """When the newest ping that the broker has answered was sent, by `protocol.bus.clock`. Everything published
        before that has reached the broker."""
        ...

    @property
    def network(self) -> str:
        """The cluster of the broker that the connection is made to, or that broker's id if it is in none."""
        ...

    @property
    def broker_id(self) -> str:
        """The id of the broker that the connection is made to; a broker has another one after each start."""
        ...

    @property
    def num_writes(self) -> int:
        """The number of times the queue was handed to the operating system. Messages queued since the last time have
        not left this process."""
        ...

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Queues a message. Everything queued in one turn of the event loop is written at its end, or once the broker
        is reachable again.

        Raises BadSubjectError, PayloadTooLargeError, OutboundBufferLimitError; ConnectionError once closed."""
        ...

    def publish_all(self, messages: Sequence[Outgoing]) -> None:
        """Queues messages in order: all of them or, if it raises, none.

        Raises PayloadTooLargeError, OutboundBufferLimitError; ConnectionError once closed. A message with a bad subject
        is logged and left out."""
        ...

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Calls `callback` with each message, in order. In a queue group only one member gets each message."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription, after delivering the messages that the broker has already sent to it."""
        ...

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns once the broker has received everything published before, and this process has read everything that
        the broker had sent it by then. Raises TimeoutError, ConnectionError."""
        ...

    def new_inbox(self) -> str:
        """Returns a unique reply subject."""
        ...

    async def close(self) -> None:
        """Ends this use of the connection. Its owner writes what is pending and disconnects. Idempotent."""
        ...


class OwnedBus(Bus, Protocol):
    """The same as its one owner sees it, who decides when it is cut."""

    on_permissions_violation: Callable[[str], None]
    """Called with the broker's error text when its permissions forbid a subject."""
    on_reconnect: Callable[[], None]
    """Called after a reconnect."""
    guard: Callable[[], bool]
    """Returns whether everything published so far may still be sent."""

    before_resume: Callable[[], Awaitable[None]] | None
    """Awaited after a reconnect, before anything that is queued is written. It may abort the connection."""

    def ping(self) -> None:
        """Sends a ping after everything published before; nothing is sent while the broker is unreachable."""
        ...

    def ask(self, subject: str, reply: str) -> None:
        """Publishes an empty message at once, even while `before_resume` is awaited."""
        ...

    async def wait_closed(self) -> None:
        """Never returns; raises ConnectionError once the broker has closed the connection for good."""
        ...

    def abort(self) -> None:
        """Cuts the connection, discards everything queued, and reconnects."""
        ...


def is_no_responders(message: Msg) -> bool:
    """Whether a message is the broker's notice that the subject of a request has no subscribers."""
    return not message.data and message.headers is not None and message.headers.get(_STATUS) == NO_RESPONDERS[_STATUS]


def lease_time() -> float:
    """Returns seconds since some fixed moment in the past, for leases: unlike `time.monotonic`, it keeps running while
    the machine sleeps. Never goes backwards."""
    return time.clock_gettime(_CLOCK)
