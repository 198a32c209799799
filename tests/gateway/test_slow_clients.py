"""A client that does not read ends its own request, and nobody else's."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.exact_client import until_idle
from tests.support.http_stream import ENDLESS, post
from tests.support.raw_client import RawClient
from tests.support.raw_http import LIVEZ, Socket, ask, cut_after, small_server
from tests.support.system import Gateway, running_gateway
from tokenbus.gateway.http import listen
from tokenbus.protocol.http.http_server import Disconnect, Timeouts
from tokenbus.protocol.http.refusals import Reason


@contextlib.contextmanager
def reading_nothing(gateway: Gateway, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Sends a request whose answer nobody reads, over a connection that buffers little of it."""
    place = urlsplit(gateway.url)
    payload = json.dumps(body).encode()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((place.hostname, place.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        yield one


async def until_received(gateway: Gateway) -> str:
    """Returns the id of the first request that the gateway has received."""
    async with asyncio.timeout(30):
        while not (received := gateway.log("request_received")):
            await asyncio.sleep(0.02)
    return str(received[0]["request_id"])


async def test_a_client_that_stops_reading_is_cut_off_as_slow_and_its_neighbour_gets_every_token(
    slow_url: str, tmp_path: Path
) -> None:
    streamed = ENDLESS | {"stream": True}
    with (
        running_gateway(slow_url, tmp_path, "--write-deadline-s", "1", "--metrics-port", "0") as gateway,
        reading_nothing(gateway, streamed),
    ):
        request_id = await until_received(gateway)
        with_usage = {"max_tokens": 100, "stream_options": {"include_usage": True}}
        async with post(gateway, streamed | with_usage) as neighbour:
            finished = await gateway.ended(request_id)
            events = [line for line in (await neighbour.rest()).splitlines() if line.startswith("data: ")]
        bare = await RawClient.connect(slow_url)
        await until_idle(bare)
        await bare.close()
        (page,) = gateway.log("status_page")
        _, shown = await ask(page["port"], LIVEZ.replace(b"/livez", b"/metrics"))
    assert (finished["finish_reason"], finished["disconnect"], finished["status"]) == ("cancelled", "slow", 200)
    assert finished["total_ms"] > 1_000
    assert b'tokenbus_gateway_client_disconnects_total{reason="slow"} 1.0' in shown
    assert b'tokenbus_gateway_client_disconnects_total{reason="gone"} 0.0' in shown
    assert [line["reason"] for line in gateway.log("connections_closed")] == ["slow_reader"]
    *_, usage, done = events
    texts = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2]]
    words = "".join(choice["delta"].get("content") or "" for (choice,) in texts).split()
    assert len(words) == json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 100
    assert done == "data: [DONE]"


async def test_a_client_that_reads_a_byte_now_and_then_is_slow() -> None:
    async with small_server(timeouts=Timeouts(slow_reader_s=0.2)) as (small, port):
        loop = asyncio.get_running_loop()
        with socket.socket() as one:
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", port))
            await loop.sock_sendall(one, LIVEZ.replace(b"livez", b"endless"))
            async with asyncio.timeout(10):
                while not small.gone.is_set():
                    with contextlib.suppress(ConnectionResetError):
                        await loop.sock_recv(one, 1)
                    await asyncio.sleep(0.01)
        assert (small.disconnects, small.ended) == ([Disconnect.SLOW], [Reason.SLOW_READER])


async def test_a_client_that_hangs_up_is_gone() -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port, LIVEZ.replace(b"livez", b"endless"), limit=1)]) as (one,):
            await one.reader.read(1)
        await asyncio.wait_for(small.gone.wait(), 10)
        assert (small.disconnects, small.ended) == ([Disconnect.GONE], [])


async def test_the_kernel_ends_a_client_that_reads_nothing_as_slow_where_it_can() -> None:
    async with small_server(prepare=lambda listening: listen.detect_slow_clients(listening, 0.3)) as (small, port):
        with cut_after([await Socket.open(port, LIVEZ.replace(b"livez", b"endless"), limit=1)]):
            await asyncio.wait_for(small.gone.wait(), 10)
        assert (small.disconnects, small.ended) == ([Disconnect.SLOW], [Reason.SLOW_READER])


async def test_the_kernel_buffers_little_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listen.detect_slow_clients(listening, 30)
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as accepted:
            accepted.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            num_bytes = 0
            with contextlib.suppress(BlockingIOError):
                while num_bytes < 1 << 24:
                    num_bytes += accepted.send(b"x" * 65_536)
            assert num_bytes < 1 << 20
