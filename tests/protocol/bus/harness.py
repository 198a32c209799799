"""A broker that a test starts, stops and freezes, and what it takes to watch a connection through that."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nats.aio.msg import Msg

from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus.connection import Connection

Connect = Callable[..., Awaitable[Connection]]
SUBJECT = "test.subject"
PATIENCE_S = 15.0


class Inbox:
    """Keeps what a subscription delivers, and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []
        self._changed = asyncio.Event()

    def __call__(self, message: Msg) -> None:
        self.messages.append(message)
        self._changed.set()

    @property
    def payloads(self) -> list[bytes]:
        return [message.data for message in self.messages]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()


class Server:
    """A broker on one port, through all its lives."""

    def __init__(self, log_path: Path) -> None:
        self.running: nats_server.NatsServer | None = None
        self._log_path = log_path
        self._port = 0

    async def start(self) -> str:
        self.running = await nats_server.start(self._port, self._log_path)
        self._port = urlsplit(self.running.url).port or 0
        return self.running.url

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It is there and answers nothing."""
        assert self.running is not None
        os.kill(self.running.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.running.pid, os.WSTOPPED)
        try:
            yield
        finally:
            os.kill(self.running.pid, signal.SIGCONT)


async def outage(server: Server, connection: Connection) -> None:
    """Ends the broker; returns when the connection has noticed."""
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while connection.is_connected:
            await asyncio.sleep(0)  # there is no event for this: let the loop see the end of the stream


async def back(server: Server, connection: Connection) -> None:
    """Starts the broker again; returns when the connection has been made again."""
    reconnected = asyncio.Event()
    connection.on_reconnect = reconnected.set
    await server.start()
    async with asyncio.timeout(PATIENCE_S):
        await reconnected.wait()


async def works(connection: Connection) -> None:
    """A message still goes to the broker and comes back."""
    inbox = Inbox()
    subject = connection.new_inbox()
    subscription = await connection.subscribe(subject, inbox)
    connection.publish(subject, b"still here")
    await inbox.until(1)
    assert inbox.payloads == [b"still here"]
    await connection.unsubscribe(subscription)
