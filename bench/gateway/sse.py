"""A client of server-sent events that costs as little as possible, for gateways and llama-server alike."""

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench import system


class Reply(NamedTuple):
    """The times at which a chat completion's pieces of text arrived, by `time.perf_counter`, and its usage."""

    began: float
    times: list[float]
    usage: dict[str, Any]
    text: str


async def events(url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the data of each event. Raises SystemExit for a response that is not an event stream."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"{url}: {status.decode().strip()} {(await reader.read(2_000)).decode()}")
        rest = b""
        async for chunk in _chunks(reader):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the chunks of a response's body, after its head. Both servers answer with events in chunks."""
    while await reader.readline() != b"\r\n":
        pass
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def complete(url: str, body: Mapping[str, Any]) -> Reply:
    """Asks for a streamed chat completion with its usage."""
    began = time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for event in events(f"{url}/chat/completions", asked):
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            if text := (delta.get("content") or delta.get("reasoning_content")):
                times.append(time.perf_counter())
                texts.append(text)
        usage = event.get("usage") or usage
        if "error" in event:
            raise SystemExit(f"{url}: {event['error']}")
    return Reply(began, times, usage, "".join(texts))


@contextlib.asynccontextmanager
async def gateway(nats_url: str, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Runs a gateway; yields its base URL and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = system.start(folder / "gateway.log", "gateway", "--nats", nats_url, "--port", str(port))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
