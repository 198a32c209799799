"""A TCP proxy to the broker that can block the direction towards it while the way back stays open.

Bytes in flight when a connection is cut never arrive, as on a network that buffers nothing."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

_TCP_CLOSE = b"\x07"


class OneWayProxy:
    """Forwards bytes between processes and a broker."""

    def __init__(self, url: str, broker_url: str, is_open: asyncio.Event) -> None:
        self.url = url
        self._broker = urlsplit(broker_url)
        self._is_open = is_open
        self._tasks: set[asyncio.Task[None]] = set()

    def block(self) -> None:
        """Stops forwarding to the broker; bytes written meanwhile wait."""
        self._is_open.clear()

    def unblock(self) -> None:
        self._is_open.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        from_broker, to_broker = await asyncio.open_connection(self._broker.hostname, self._broker.port)
        there = asyncio.create_task(self._to_broker(reader, writer.get_extra_info("socket"), to_broker))
        back = asyncio.create_task(_pass_on(from_broker, writer))
        self._tasks |= {there, back}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _to_broker(
        self, reader: asyncio.StreamReader, source: socket.socket, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                was_blocked = not self._is_open.is_set()
                await self._is_open.wait()
                if was_blocked and _is_cut(source):
                    break
                writer.write(data)
                await writer.drain()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def _is_cut(source: socket.socket) -> bool:
    """Returns whether the other side has reset the connection, without reading everything before that."""
    return source.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _TCP_CLOSE


@contextlib.asynccontextmanager
async def one_way_proxy(broker_url: str) -> AsyncIterator[OneWayProxy]:
    """Runs an unblocked proxy to a broker; processes connect to its `url`."""
    is_open = asyncio.Event()
    is_open.set()
    way = OneWayProxy("", broker_url, is_open)
    server = await asyncio.start_server(way.accept, "127.0.0.1", 0)
    way.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        server.close()
        await way.close()
