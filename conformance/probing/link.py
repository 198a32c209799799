"""The raw connection to the broker: publishes, receives in order, and records permission violations."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tokenbus.protocol.bus import connection, handshake

_CONNECT_TIMEOUT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Received:
    """One message as it arrived."""

    order: int
    """Its number among all messages of the connection. NATS keeps the order of one process's messages."""
    at: float
    subject: str
    data: bytes
    headers: dict[str, str]
    reply: str = ""

    @property
    def is_no_responders(self) -> bool:
        """Whether this is the broker's reply that the subject has no subscribers."""
        return not self.data and self.headers.get("Status") == "503"


Callback = Callable[[Received], None]


class _Client(handshake.HandshakeClient):
    """Passes messages on as they are read. nats-py's own callbacks keep the order only within a subscription."""

    def __init__(self, settings: connection.BusSettings) -> None:
        super().__init__(settings)
        self.callbacks: dict[int, Callback] = {}
        self._num_received = 0

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> None:
        self._num_received += 1
        if (take := self.callbacks.get(sid)) is not None:
            at, to = time.monotonic(), reply.decode() if reply else ""
            take(Received(self._num_received, at, subject.decode(), data, headers or {}, to))


class ProbeLink:
    """The single connection shared by all rules."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._denials: list[str] = []
        self._denied = asyncio.Event()
        """Set and cleared at once whenever the broker denies something, to wake the waiters."""

    def __repr__(self) -> str:
        return f"<ProbeLink {'up' if self._client.is_connected else 'down'}, {len(self._denials)} denials>"

    @classmethod
    async def open(cls, settings: connection.BusSettings, inbox_prefix: str) -> "ProbeLink":
        """Connects. Raises ConnectionError saying what to do."""
        link = cls(_Client(settings))
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await link._client.connect(
                    name="wire-check",
                    error_cb=link._note,
                    allow_reconnect=False,
                    inbox_prefix=inbox_prefix,
                    skip_subject_validation=True,
                    **settings.server_options,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            with contextlib.suppress(Exception):  # a half-open client may raise anything
                await link._client.close()
            raise connection.connect_error(settings, error, "no answer") from error
        return link

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def subscribe(self, subject: str, take: Callback) -> Subscription:
        # nats-py has no public way to find a raw message's subscription.
        subscription = await self._client.subscribe(subject, cb=_nothing)
        self._client.callbacks[subscription._id] = take
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Takes effect here at once, and at the broker when the next flush returns."""
        self._client.callbacks.pop(subscription._id, None)
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, Any] | None = None
    ) -> None:
        """Publishes a message. Raises nats.errors.Error once the broker has closed the connection."""
        await self._client.publish(subject, payload, reply=reply, headers=headers)

    async def flush(self) -> None:
        """Waits until the broker has processed everything sent before."""
        # nats-py's reader ends when a PONG arrives for a cancelled flush
        await asyncio.shield(self._client.flush())

    def denied_reason(self, subjects: set[str]) -> str | None:
        """Returns the broker's error text if it has denied one of these subjects."""
        # The broker's text is `permissions violation for publish to "subject"`, which nats-py converts to lower case.
        lowered = [subject.lower() for subject in subjects]
        for refusal in self._denials:
            if any(f'"{subject}"' in refusal for subject in lowered):
                return refusal
        return None

    async def wait_denied(self, subjects: set[str]) -> None:
        """Waits until the broker denies one of these subjects. The set may grow in the meantime."""
        while self.denied_reason(subjects) is None:
            await self._denied.wait()

    async def close(self) -> None:
        await self._client.close()

    async def _note(self, error: Exception) -> None:
        if "permissions violation" in (text := str(error).lower()):
            self._denials.append(text.removeprefix("nats: "))
            self._denied.set()
            self._denied.clear()


async def _nothing(message: Msg) -> None:
    """Does nothing: `_build_message` has already passed the message on."""
