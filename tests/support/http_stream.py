"""A completion from a gateway over a raw socket, which a test can cut."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from tests.support.system import Gateway

ENDLESS: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "go"}], "max_tokens": 2_000}


class HttpStream:
    """One request and its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def line(self, start: str) -> str:
        """Returns the next line with this beginning; fails if the response ends before."""
        async with asyncio.timeout(60):
            while True:
                try:
                    line = await self._reader.readuntil(b"\n")
                except asyncio.IncompleteReadError as error:
                    line = error.partial
                if line.decode().startswith(start):
                    return line.decode().strip()
                assert line, f"the answer ended without {start!r}"

    async def rest(self) -> str:
        return (await self._reader.read()).decode()

    async def cut(self) -> None:
        """Resets the connection."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def post(gateway: Gateway, body: dict[str, Any], *headers: str) -> AsyncIterator[HttpStream]:
    place = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    payload = json.dumps(body).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: gateway", "Content-Type: application/json"]
    head += [f"Content-Length: {len(payload)}", "Connection: close", *headers, "", ""]
    writer.write("\r\n".join(head).encode() + payload)
    one = HttpStream(reader, writer)
    try:
        yield one
    finally:
        await one.cut()
