"""The `Bus` of a simulated process: one turn of its event loop is one write, and a cut may lose any part of that."""

import asyncio
import contextlib
import itertools
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from nats.aio.msg import Msg

from tests.sim.network import Broker, Link, Subscription
from tests.sim.world import Process
from tokenbus.protocol.bus import bus
from tokenbus.protocol.wire import limits

RECONNECT_S = 0.2
_MAX_PENDING = 50_000
_MAX_PAYLOAD = 1_048_576
_is_subject = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*").fullmatch


class SimBus:
    """A `Bus` of one simulated process."""

    _numbers = itertools.count()

    def __init__(self, process: Process, broker: Broker) -> None:
        self.process = process
        self._broker = broker
        self._subscriptions: list[Subscription] = []
        self._pending: list[Callable[[Link], None]] = []
        self._pings: deque[tuple[float, asyncio.Future[None] | None]] = deque()
        self._inbox = f"_INBOX.{next(self._numbers)}"
        self.link: Link | None = None
        self._is_closed = False
        self._flushing = False
        self.on_permissions_violation: Callable[[str], None] = lambda words: None
        self.on_reconnect: Callable[[], None] = lambda: None
        self.guard: Callable[[], bool] = lambda: True
        self.before_resume: Callable[[], Awaitable[None]] | None = None
        self._held: list[Callable[[Link], None]] | None = None
        """What waits until the connection may be used again after a reconnect."""
        self.reconnect_s = RECONNECT_S
        """Time until it tries to connect again."""
        self.num_reconnects = 0
        self.num_writes = 0
        """The number of writes so far. Everything published in one turn of the event loop is one write."""
        self.max_payload = _MAX_PAYLOAD
        self.is_busy = False
        """Whether the outbound buffer counts as full."""
        self.tap: Callable[[Msg], None] = lambda message: None
        """Called with every message that arrives."""
        self.last_received_at = self.confirmed_at = process.world.now
        self.reconnected_at = -math.inf
        self._connect()

    def __repr__(self) -> str:
        return f"<SimBus of {self.process!r} {'up' if self.is_connected else 'down'}>"

    @property
    def network(self) -> str:
        return self._broker.name

    @property
    def broker_id(self) -> str:
        return self._broker.name

    @property
    def is_connected(self) -> bool:
        return self.link is not None and self._held is None

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self.publish_all([bus.Outgoing(subject, payload, reply, headers)])

    def publish_all(self, messages: Sequence[bus.Outgoing]) -> None:
        """Queues several messages, or none of them."""
        for one in messages:
            if not _is_subject(one.subject) or (one.reply and not _is_subject(one.reply)):
                raise bus.BadSubjectError(f"{one.subject!r} or {one.reply!r}")
            if len(one.subject + one.reply) > limits.MAX_CONTROL_LINE_BYTES:
                raise bus.BadSubjectError("too long")
            if len(one.payload) > self.max_payload:
                raise bus.PayloadTooLargeError(f"{len(one.payload)} bytes")
        if self._is_closed:
            raise ConnectionError("closed")
        if self.is_busy or len(self._pending) + len(messages) > _MAX_PENDING:
            raise bus.OutboundBufferLimitError("too much is waiting")
        for message in messages:
            self._put(lambda link, one=message: self._route(link, one))  # type: ignore[misc]

    def _route(self, link: Link, message: bus.Outgoing) -> None:
        self._broker.route(link, message.subject, message.payload, message.reply, message.headers)

    async def subscribe(self, subject: str, callback: bus.Callback, queue: str = "") -> Subscription:
        subscription = Subscription(subject, callback, queue)
        self._subscriptions.append(subscription)
        self._put(lambda link: self._register(link, subscription), is_held=False)
        return subscription

    async def unsubscribe(self, subscription: bus.Subscription) -> None:
        assert isinstance(subscription, Subscription)
        self._put(lambda link: _forget(link, subscription))
        with contextlib.suppress(TimeoutError, ConnectionError):
            await self.flush()
        self._subscriptions.remove(subscription)

    async def flush(self, timeout_s: float = 5.0) -> None:
        if not self.is_connected:
            raise ConnectionError("the broker is away")
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ping(answered)
        async with asyncio.timeout(timeout_s):
            await answered

    def ping(self) -> None:
        if self.is_connected:
            self._ping(None)

    def ask(self, subject: str, reply: str) -> None:
        if self.link is not None:
            message = bus.Outgoing(subject, b"", reply)
            self._put(lambda link: self._route(link, message), is_held=False)

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()

    def new_inbox(self) -> str:
        return f"{self._inbox}.{next(self._numbers)}"

    def abort(self) -> None:
        self._pending.clear()
        self._held = None
        if self.link is not None:
            self._broker.cut(self.link, lingers=self.process.world.rng.random() < 0.5)

    async def close(self) -> None:
        self._is_closed = True

    def receive(self, link: Link, subscription: Subscription | None, message: Msg | None) -> None:
        """Handles a message or an answer to a ping that has arrived."""
        if link is not self.link:
            return
        self.last_received_at = self.process.world.now
        if subscription is None:
            self._answered()
        elif subscription in self._subscriptions and message is not None:
            self.tap(message)
            subscription.callback(message)

    def broke(self, link: Link) -> None:
        if link is self.link:
            self.link = None
            self._pings.clear()
            self.process.loop.call_later(self.reconnect_s, self._try_again)

    def cut(self, *, lingers: bool) -> None:
        """Breaks the connection, if there is one. With `lingers` the broker still gets what was written."""
        if self.link is not None:
            self._broker.cut(self.link, lingers=lingers)

    def _ping(self, waiting: asyncio.Future[None] | None) -> None:
        self._pings.append((self.process.world.now, waiting))
        self._put(_pong)

    def _answered(self) -> None:
        if not self._pings:
            return
        sent_at, waiting = self._pings.popleft()
        if waiting is None:
            self.confirmed_at = sent_at
        elif not waiting.done():
            waiting.set_result(None)

    def _try_again(self) -> None:
        if self.link is not None or self._is_closed:
            return
        if not self._broker.is_up or self._broker.is_paused:
            self.process.loop.call_later(self.reconnect_s, self._try_again)
            return
        self._connect()
        self.num_reconnects += 1
        if self.before_resume is None:
            self.on_reconnect()
        else:
            assert self.link is not None
            self.process.spawn(self._resume(self.link, self.before_resume))

    async def _resume(self, link: Link, before_resume: Callable[[], Awaitable[None]]) -> None:
        await before_resume()
        if self.link is link and self._held is not None:
            held, self._held = self._held, None
            for action in held:
                self._put(action)
            self.on_reconnect()

    def _connect(self) -> None:
        self.link = Link(self._broker, self)
        self.confirmed_at = self.process.world.now
        self._broker.links.append(self.link)
        kept = [action for action in (*(self._held or ()), *self._pending) if action is not _pong]
        self._held, self._pending = None, []
        for subscription in self._subscriptions:
            self._put(lambda link, one=subscription: self._register(link, one))  # type: ignore[misc]
        self._held = None if self.before_resume is None else []
        for action in kept:
            self._put(action)

    def _register(self, link: Link, subscription: Subscription) -> None:
        if subscription in self._subscriptions and subscription not in link.subscriptions:
            link.subscriptions.append(subscription)

    def _put(self, action: Callable[[Link], None], *, is_held: bool = True) -> None:
        if is_held and self._held is not None:
            self._held.append(action)
            return
        self._pending.append(action)
        if not self._flushing:
            self._flushing = True
            self.process.loop.call_soon(self._write)

    def _write(self) -> None:
        self._flushing = False
        if self.link is None or not self._pending:
            return
        if not self.guard():
            self.abort()
            return
        self.num_writes += 1
        pending, self._pending = self._pending, []
        for action in pending:
            self.link.send(action)


def _pong(link: Link) -> None:
    link.deliver(None, None)


def _forget(link: Link, subscription: Subscription) -> None:
    if subscription in link.subscriptions:
        link.subscriptions.remove(subscription)
