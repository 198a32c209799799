"""The bus as every part of the system sees it: what may be expected of whatever carries messages.

1. What one connection publishes reaches another in the order of publishing, over all its subscriptions, at most once.
   Between what two connections publish there is no order.
2. Messages may be lost where a connection breaks, in both directions, and nowhere else.
3. Callbacks are plain functions and run one at a time; what they raise is logged and disturbs nobody.
4. A request to a subject that nobody listens on fails at once. A message with a reply subject, published where nobody
   listens, brings a notice to that reply subject (`is_no_responders`) if this connection subscribes it.
5. Nothing waits: `publish` returns at once, also while the broker is away; what waits for the broker is bounded.
6. `guard` is asked before anything is written to the broker. When it says no, everything that waits is thrown away
   and the connection is made anew; what was published before that never reaches the broker.
"""

from collections.abc import Callable
from typing import Protocol

from nats.aio.msg import Msg

Callback = Callable[[Msg], None]

_NO_RESPONDERS = "503"


class PayloadTooLargeError(ValueError):
    """The message is larger than the broker takes; nothing was sent."""


class BadSubjectError(ValueError):
    """The broker would close the connection for this subject or reply subject; nothing was sent."""


class NoRespondersError(LookupError):
    """Nobody listens on the subject."""


class OutboundBufferLimitError(RuntimeError):
    """More is waiting to be written than may wait; nothing was sent."""


class Subscription(Protocol):
    """What `subscribe` returns, for `unsubscribe`."""


class Bus(Protocol):
    """One process's connection to the broker; the guarantees are this module's docstring."""

    on_permissions_violation: Callable[[str], None]
    """Called with the broker's words where its permissions forbid a subject."""
    on_reconnect: Callable[[], None]
    """Called after the connection has been made again."""
    guard: Callable[[], bool]
    """Whether what was published so far may still be said."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def last_received_at(self) -> float:
        """When something last came from the broker, by `time.monotonic`."""
        ...

    @property
    def confirmed_at(self) -> float:
        """When the last ping that the broker has answered was sent, by `protocol.clock`: everything published before
        that has reached the broker."""
        ...

    @property
    def max_payload(self) -> int:
        """Bytes that the broker takes in one message, headers included."""
        ...

    def ping(self) -> None:
        """Asks the broker for a sign, behind everything published before. While it is away nothing is sent."""
        ...

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Sends a message, at the end of this loop turn, together with everything else published in it.

        While the broker is away it waits for it.
        Raises BadSubjectError, PayloadTooLargeError and OutboundBufferLimitError; ConnectionError once closed."""
        ...

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Calls `callback` with each message, in order. Of one `queue` only one member gets each message."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription after the messages that the broker has already sent for it."""
        ...

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """The first reply. Raises NoRespondersError, TimeoutError, PayloadTooLargeError, ConnectionError."""
        ...

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns when the broker has everything that was published before, and everything that it had for this
        connection by then has been read. Raises TimeoutError, ConnectionError."""
        ...

    async def wait_closed(self) -> None:
        """Waits for ever, or raises ConnectionError when the broker has closed the connection for good."""
        ...

    def new_inbox(self) -> str:
        """A reply subject that nobody else uses."""
        ...

    def abort(self) -> None:
        """Cuts the connection, throws away what waits to be written, and connects anew."""
        ...

    async def close(self) -> None:
        """Writes out what is pending and disconnects. Safe to call twice."""
        ...


def is_no_responders(message: Msg) -> bool:
    """Whether this is the broker's notice that nobody listens where something was published."""
    return not message.data and message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS
