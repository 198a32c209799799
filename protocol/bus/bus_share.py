"""Lets several users have one connection, each of whom can leave alone."""

import asyncio
import contextvars
from collections.abc import Sequence

from tokenbus.protocol.bus.bus import Bus, Callback, Outgoing, Subscription


class BusShare:
    """One user's share of a `Bus`. Its messages keep their order among those of all shares.

    Its callbacks run in the context in which they were subscribed, so that what they log names their user. Closing it
    ends its subscriptions, and leaves the connection open."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._subscriptions: list[Subscription] = []

    def __repr__(self) -> str:
        return f"<BusShare of {self._bus!r}, {len(self._subscriptions)} subscriptions>"

    @property
    def is_connected(self) -> bool:
        return self._bus.is_connected

    @property
    def last_received_at(self) -> float:
        return self._bus.last_received_at

    @property
    def reconnected_at(self) -> float:
        return self._bus.reconnected_at

    @property
    def confirmed_at(self) -> float:
        return self._bus.confirmed_at

    @property
    def network(self) -> str:
        return self._bus.network

    @property
    def broker_id(self) -> str:
        return self._bus.broker_id

    @property
    def max_payload(self) -> int:
        return self._bus.max_payload

    @property
    def num_writes(self) -> int:
        return self._bus.num_writes

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self._bus.publish(subject, payload, reply, headers)

    def publish_all(self, messages: Sequence[Outgoing]) -> None:
        self._bus.publish_all(messages)

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        context = contextvars.copy_context()
        subscription = await self._bus.subscribe(subject, lambda message: context.run(callback, message), queue)
        self._subscriptions.append(subscription)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)
        await self._bus.unsubscribe(subscription)

    async def flush(self, timeout_s: float = 5.0) -> None:
        await self._bus.flush(timeout_s)

    def new_inbox(self) -> str:
        return self._bus.new_inbox()

    async def close(self) -> None:
        ended, self._subscriptions = self._subscriptions, []
        await asyncio.gather(*map(self._bus.unsubscribe, ended))
