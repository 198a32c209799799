"""An HTTP client that costs as little as possible, for gateways and other servers alike."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Reply(NamedTuple):
    """The times at which a chat completion's pieces of text arrived, by `time.perf_counter`, and its usage."""

    began: float
    times: list[float]
    usage: dict[str, Any]


@contextlib.asynccontextmanager
async def _response(url: str, body: Mapping[str, Any] | None) -> AsyncIterator[asyncio.StreamReader]:
    """Sends a request on a connection of its own; yields the response's body. Raises SystemExit unless it is a 200."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{'GET' if body is None else 'POST'} {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"{url}: {status.decode().strip()} {(await reader.read(2_000)).decode()}")
        while await reader.readline() != b"\r\n":
            pass
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Returns the JSON with which a server answers in one piece."""
    async with _response(url, body) as reader:
        return json.loads(await reader.read())


async def until_answered(url: str) -> None:
    """Waits until a server answers with a 200."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(OSError, SystemExit):
                await ask(url)
                return
            await asyncio.sleep(0.2)


async def events(url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the data of each event of an event stream, which all servers send in chunks."""
    async with _response(url, body) as reader:
        rest = b""
        while size := int(await reader.readline(), 16):
            *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
            await reader.readexactly(2)
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


async def complete(url: str, body: Mapping[str, Any]) -> Reply:
    """Asks for a streamed chat completion with its usage."""
    began = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for event in events(f"{url}/chat/completions", asked):
        for choice in event.get("choices") or ():
            if choice["delta"].get("content") or choice["delta"].get("reasoning_content"):
                times.append(time.perf_counter())  # noqa: PERF401 - each at its own time
        usage = event.get("usage") or usage
        if "error" in event:
            raise SystemExit(f"{url}: {event['error']}")
    return Reply(began, times, usage)
