"""Looks at a fleet for as long as it is open: asks its routers again and again, and puts their digests together."""

import asyncio
import contextlib
import secrets
import time

from nats.aio.msg import Msg

from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.protocol import tasks
from tokenbus.protocol.bus import bus
from tokenbus.protocol.wire import codec, errors, messages

_digests = codec.Decoder(messages.FleetDigest)
_ASK_S = 1.5
"""Often enough that two requests may be lost before a router sends no more."""
_FIRST_ASK_S = 0.2
"""While the picture is not complete, as after the start or a loss."""


class FleetViewer:
    """A view of the fleet. Use it as `async with`; `changed` is set after each digest."""

    def __init__(self, connection: bus.Bus, subject: str, inbox: str, encoding: codec.Encoding) -> None:
        self.picture = FleetPicture()
        self.changed = asyncio.Event()
        self.problem = ""
        """Why nothing is seen; empty if a router answers."""
        self._connection = connection
        self._subject = subject
        self._inbox = f"{inbox}.{secrets.token_hex(8)}"
        self._encoding = encoding
        self._subscription: bus.Subscription | None = None
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<FleetViewer {self.picture!r}>"

    async def __aenter__(self) -> "FleetViewer":
        self._subscription = await self._connection.subscribe(self._inbox, self._take)
        self._asking = tasks.background("look at the fleet", self._ask_forever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if self._subscription is not None:
            with contextlib.suppress(ConnectionError):
                await self._connection.unsubscribe(self._subscription)

    async def usage_problem(self, timeout_s: float = 1.0) -> str | None:
        """Returns why a router can't save usage; an empty text if none says so in time, None if none answers."""
        problem: str | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not problem:
                    await self.changed.wait()
                    self.changed.clear()
                    problems = [one.usage_problem for one in self.picture.routers()]
                    problem = next(filter(None, problems), "" if problems else None)
        return problem

    async def _ask_forever(self) -> None:
        while True:
            headers = codec.content_headers(self._encoding)
            for asked in self.picture.requests(time.monotonic()):
                payload = codec.encode(asked, self._encoding)
                with contextlib.suppress(bus.OutboundBufferLimitError, ConnectionError):
                    self._connection.publish(self._subject, payload, self._inbox, headers)
            if not self._connection.is_connected:
                self._show_problem("the broker can't be reached")
            await asyncio.sleep(_ASK_S if self.picture.is_complete else _FIRST_ASK_S)

    def _take(self, message: Msg) -> None:
        if bus.is_no_responders(message):
            self._show_problem("no router listens on this broker")
            return
        try:
            digest = _digests.decode(message.data, self._encoding)
        except errors.RequestError as error:
            self._show_problem(f"a router's digest can't be read: {error.error.message}")
            return
        if digest.error:
            self._show_problem(digest.error.message)
            return
        self.picture.apply(digest, time.monotonic())
        if self.picture.is_complete:
            self.problem = ""
        if not digest.parts or digest.part + 1 == digest.parts:
            self.changed.set()

    def _show_problem(self, problem: str) -> None:
        self.problem = problem
        self.changed.set()
