"""HTTP over raw sockets, to send what no HTTP library would, and a small server for it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.types import Receive, Scope, Send

from tokenbus.gateway.dialects import refusal_response
from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.http.http_server import Disconnect, EmbeddedServer, ServerConfig, Timeouts, disconnect_of
from tokenbus.protocol.http.refusals import Reason

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
WIDE, USUAL = ConnectionLimits(1_000), Timeouts()
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
HALF_A_HEAD = b"GET /livez HTTP/1.1\r\nHo"


class Socket:
    """The client's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, said: bytes = b"", source: str = "127.0.0.1", limit: int = 1 << 16) -> "Socket":
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), limit=limit)
        writer.write(said)
        return cls(reader, writer)

    def say(self, said: bytes) -> None:
        self._writer.write(said)

    def say_no_more(self) -> None:
        """Shuts down the sending side."""
        self._writer.write_eof()

    def close(self) -> None:
        """Closes the connection once everything is sent."""
        self._writer.close()

    @property
    def num_unsent_bytes(self) -> int:
        """The bytes that the server has not read, beyond those in the kernel's buffers."""
        return self._writer.transport.get_write_buffer_size()

    async def answer(self) -> tuple[int, bytes]:
        """Returns status and body of the next response, which must have a Content-Length."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return int(head.split()[1]), await self.reader.readexactly(int(length.split(b":")[1]))

    async def rest(self) -> bytes:
        """Returns all bytes until the server closes the connection, which it must."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def cut(self) -> None:
        self._writer.transport.abort()


async def ask(port: int, said: bytes = LIVEZ, source: str = "127.0.0.1") -> tuple[int, bytes]:
    """Sends bytes on a new connection and returns the first response."""
    with cut_after([await Socket.open(port, said, source)]) as (one,):
        return await one.answer()


@contextlib.contextmanager
def cut_after(sockets: list[Socket]) -> Iterator[list[Socket]]:
    """Cuts all sockets in the list at the end."""
    try:
        yield sockets
    finally:
        for one in sockets:
            one.cut()


class SmallServer:
    """A server with a health check, and paths that read a body, that wait for their client to leave or for the test,
    within a stream of events or before an answer, and one with an endless response."""

    def __init__(self, limits: ConnectionLimits, timeouts: Timeouts) -> None:
        self.ended: list[Reason] = []
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self._arrived = asyncio.Event()
        self.disconnects: list[Disconnect | None] = []
        self.gone = asyncio.Event()
        """Set when the client of an endless response or body is gone."""
        self.may_answer = asyncio.Event()
        self.config = ServerConfig(
            self._serve,
            limits,
            refusal_response=refusal_response,
            on_closed=lambda reason, _: self.ended.append(reason),
            timeouts=timeouts,
        )

    async def until_asked(self, count: int) -> None:
        """Waits until `count` requests have arrived."""
        async with asyncio.timeout(10):
            while len(self.paths) < count:
                self._arrived.clear()
                await self._arrived.wait()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self._arrived.set()
        if scope["method"] == "POST" and scope["path"] != "/livez":
            await self._read(receive)
        elif scope["path"] == "/wait":
            await self.may_answer.wait()
        elif scope["path"] == "/events":
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await self.may_answer.wait()
            await send({"type": "http.response.body", "body": b"data: 2\n\n"})
            return
        elif scope["path"] in ("/hold", "/hold_events"):
            if scope["path"] == "/hold_events":
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await self._until_gone(receive)
            self.disconnects.append(disconnect_of(scope))
            return
        elif scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            watching = asyncio.create_task(self._until_gone(receive))
            while not self.gone.is_set():
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                await asyncio.sleep(0)
            await watching
            self.disconnects.append(disconnect_of(scope))
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"ok\n"})

    async def _read(self, receive: Receive) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@contextlib.asynccontextmanager
async def small_server(
    limits: ConnectionLimits = WIDE,
    timeouts: Timeouts = USUAL,
    prepare: Callable[[socket.socket], None] = lambda listening: None,
) -> AsyncIterator[tuple[SmallServer, int]]:
    """Runs the server on a socket that `prepare` may set up; yields it and its port."""
    small = SmallServer(limits, timeouts)
    server = EmbeddedServer(small.config)
    with socket.create_server(("127.0.0.1", 0), backlog=2_048) as listening:
        prepare(listening)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield small, listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving
    small.config.open_connections.check_integrity()
    assert len(small.config.open_connections) == 0
