"""A client that the broker cuts off because it does not read ends its own requests, and nobody else's."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hostile import scale
from tests.support.exact_client import ask, until_idle, until_ready
from tests.support.raw_client import PREFIX, check_stream
from tests.support.raw_http import LIVEZ
from tests.support.raw_http import ask as ask_http
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

NUM_STREAMS = 16
LIMITS = {
    "MaxPending": 'max_payload: 256KB\nmax_pending: 256KB\nwrite_deadline: "60s"\n',
    "WriteDeadline": 'write_deadline: "500ms"\n',
}
"""Settings of a broker that reaches one of its limits, by the word that its log has for it."""


@contextlib.contextmanager
def reading_nothing(url: str) -> Iterator[None]:
    """Subscribes, sends requests for endless streams over a connection that buffers little, and reads nothing."""
    place = urlsplit(url)
    payload = json.dumps({"prompt": "Once upon a time", "max_tokens": 5_000, "ignore_eos": True}).encode()
    lines = [b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n', b"SUB _INBOX.slow.* 1\r\n"]
    for number in range(NUM_STREAMS):
        lines.append(b"PUB %b.generate.demo _INBOX.slow.%d %d\r\n" % (PREFIX.encode(), number, len(payload)))
        lines.append(payload + b"\r\n")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((place.hostname, place.port))
        one.sendall(b"".join(lines))
        yield


@pytest.mark.parametrize("limit", list(LIMITS)[: scale.times(1, 2)])
async def test_a_client_that_the_broker_cuts_off_is_gone_and_its_neighbours_get_every_byte(
    tmp_path: Path, limit: str
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(LIMITS[limit])
    system = await System.start(tmp_path, config)
    try:
        system.router("router")
        system.worker(
            "worker",
            "--engine",
            "sim",
            "--sim-speedup",
            "10",
            "--max-num-seqs",
            "32",
            "--metrics-port",
            "0",
            model="steps-of-50ms",
        )
        bare = await system.connect()
        await until_ready(bare, 1)
        async with await WireClient.connect(system.url) as client:
            exact = [ask(client, 800) for _ in range(3)]
            await asyncio.gather(*(one.speaks() for one in exact))
            with reading_nothing(system.url):
                plain = await bare.generate({"prompt": "Once upon a time", "max_tokens": 800, "ignore_eos": True})
                await system.until_logged("worker", "client_gone")
                for one in await asyncio.gather(*(one.end() for one in exact)):
                    one.check()
                    assert one.is_whole
                await plain.terminal()
                check_stream(plain)
                assert plain.num_tokens == 800
                await until_idle(bare)
        log = system.log("worker")
        ends = [line["finish_reason"] for line in log if line["event"] == "request_finished"]
        assert sorted(map(str, ends)) == ["cancelled"] * NUM_STREAMS + ["length"] * 4
        assert sum(line["event"] == "client_gone" for line in log) == NUM_STREAMS
        (port,) = [line["port"] for line in log if line["event"] == "status_page"]
        assert isinstance(port, int)
        _, shown = await ask_http(port, LIVEZ.replace(b"/livez", b"/metrics"))
        assert b'tokenbus_worker_clients_gone_total{model="demo",worker_id="worker"} %d.0' % NUM_STREAMS in shown
        assert f"Slow Consumer Detected: {limit}" in (tmp_path / "nats.log").read_text()
    finally:
        await system.stop()
