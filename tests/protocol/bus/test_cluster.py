"""A connection finds its way in a cluster of brokers. Every test has real nats-servers."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.protocol.bus.harness import PATIENCE_S, SUBJECT, Connect, Inbox, Server, works
from tests.support.cluster import Cluster
from tokenbus.protocol.bus import nats_client
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect
from tokenbus.protocol.bus.nats_client import MAX_MOVE_DELAY_S, OPTIONS, HardenedClient
from tokenbus.protocol.bus.settings import Credentials
from tokenbus.worker.broker.fence import FENCE_S

NOBODY = "nats://127.0.0.1:1"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await Cluster.start(tmp_path)
    yield cluster
    cluster.stop()


def reconnects(connection: Connection) -> asyncio.Event:
    """Returns what is set when the connection has been made again."""
    again = asyncio.Event()
    connection.on_reconnect = again.set
    return again


@pytest.mark.parametrize("turn", range(4))  # servers are tried in any order
async def test_a_server_that_is_not_there_is_passed_over(cluster: Cluster, turn: int) -> None:
    settings = BusSettings(url=f"{NOBODY}, {cluster['a'].url}", connect_timeout_s=PATIENCE_S)
    settings.check()
    connection = await connect(settings, "test")
    await works(connection)
    assert connection.is_connected
    await connection.close()


async def test_the_others_of_a_cluster_are_found_when_a_server_dies_before_a_frontend_would_fence_itself(
    cluster: Cluster,
) -> None:
    connection = await connect(BusSettings(url=cluster["a"].url), "test")
    again = reconnects(connection)
    cluster["a"].kill()
    async with asyncio.timeout(FENCE_S):
        await again.wait()
    await works(connection)
    await connection.close()


async def test_a_server_that_was_cut_off_because_it_stood_still_is_tried_last(cluster: Cluster) -> None:
    connections = [await connect(BusSettings(url=cluster["a"].url), "test") for _ in range(8)]
    again = [reconnects(one) for one in connections]
    with cluster.frozen("a"):
        for one in connections:
            one.abort()
        async with asyncio.timeout(FENCE_S):
            await asyncio.gather(*(one.wait() for one in again))
        for one in connections:
            await works(one)
            await one.close()


async def test_who_is_sent_away_by_a_server_goes_soon_and_loses_nothing_that_it_has_published(cluster: Cluster) -> None:
    sender, receiver = [await connect(BusSettings(url=cluster[name].url), "test") for name in "ab"]
    inbox = Inbox()
    await receiver.subscribe(SUBJECT, inbox)
    await receiver.flush()
    await works(sender)
    again, count = reconnects(sender), 0
    cluster.send_away("a")
    async with asyncio.timeout(MAX_MOVE_DELAY_S + 1):
        while not again.is_set():
            sender.publish(SUBJECT, b"%d" % count)
            count += 1
            await asyncio.sleep(0.001)
    sender.publish(SUBJECT, b"%d" % count)
    await inbox.until(count + 1)
    assert inbox.payloads == [b"%d" % number for number in range(count + 1)]
    for one in (sender, receiver):
        await one.close()


class SlowServer:
    """A server that answers pings when it is told to, and may send its clients away."""

    def __init__(self) -> None:
        self.said = b""
        self.came = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.others: list[str] = []
        self._writer: asyncio.StreamWriter | None = None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._inform(ldm=False)
        self.came.set()
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while line := await reader.readline():
                self.said += line
                if line == b"PING\r\n":
                    await self.may_answer.wait()
                    writer.write(b"PONG\r\n")

    def send_away(self) -> None:
        self._inform(ldm=True)

    def _inform(self, *, ldm: bool) -> None:
        assert self._writer is not None
        info = {"max_payload": 1_000_000, "headers": True, "connect_urls": self.others, "ldm": ldm}
        self._writer.write(b"INFO %b\r\n" % json.dumps(info).encode())


async def test_who_is_sent_away_goes_when_the_server_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "MAX_MOVE_DELAY_S", 0.0)
    old, new = SlowServer(), SlowServer()
    async with (
        await asyncio.start_server(old.accept, "127.0.0.1") as at_old,
        await asyncio.start_server(new.accept, "127.0.0.1") as at_new,
    ):
        urls = [f"127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in (at_old, at_new)]
        old.others = new.others = urls
        connection = await connect(BusSettings(url=f"nats://{urls[0]}"), "test")
        old.may_answer.clear()
        connection.publish(SUBJECT, b"last")
        old.send_away()
        async with asyncio.timeout(PATIENCE_S):
            while not old.said.endswith(b"last\r\nPING\r\n"):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert not new.came.is_set()
            old.may_answer.set()
            await new.came.wait()
        await connection.close()


async def test_who_has_no_other_server_stays_until_it_is_cut_off(server: Server, connected: Connect) -> None:
    assert server.running is not None
    connection = await connected()
    again = reconnects(connection)
    os.kill(server.running.pid, signal.SIGUSR2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_MOVE_DELAY_S + 0.2):
            await again.wait()
    assert not again.is_set()
    await works(connection)


async def test_a_user_that_is_named_in_the_url_is_one_at_every_server(tmp_path: Path) -> None:
    cluster = await Cluster.start(tmp_path, "ab", "authorization { user: ada, password: secret }\n")
    try:
        url = cluster["a"].url.replace("://", "://ada:secret@")
        connection = await connect(BusSettings(url=url), "test")
        again = reconnects(connection)
        cluster["a"].kill()
        async with asyncio.timeout(PATIENCE_S):
            await again.wait()
        await works(connection)
        await connection.close()
    finally:
        cluster.stop()


async def test_a_server_that_has_left_the_cluster_is_forgotten_unless_it_was_named(cluster: Cluster) -> None:
    settings = BusSettings(url=f"{cluster['a'].url},{cluster['b'].url}")
    client = HardenedClient(settings)
    ports = {name: urlsplit(cluster[name].url).port for name in "abc"}
    await client.connect(**settings.server_options, **OPTIONS)
    assert {one.uri.port for one in client.server_pool} == set(ports.values())
    for name in "bc" if client.connected_url.port == ports["a"] else "ac":
        cluster[name].kill()
    async with asyncio.timeout(PATIENCE_S):
        while len(client.server_pool) > 2:
            await asyncio.sleep(0.01)
    assert {one.uri.port for one in client.server_pool} == {ports["a"], ports["b"]}
    await client.close()


@pytest.mark.parametrize(
    ("url", "user", "password", "token"),
    [
        ("nats://a:1,nats://b:2", None, None, None),
        ("nats://ada:secret@a:1, nats://b:2", "ada", "secret", None),
        ("nats://a:1,nats://ada:secret@b:2", "ada", "secret", None),
        ("nats://a:1,nats://t0ken@b:2", None, None, "t0ken"),
    ],
)
def test_urls_are_taken_apart(url: str, user: str | None, password: str | None, token: str | None) -> None:
    settings = BusSettings(url=url)
    settings.check()
    options = settings.server_options
    assert sorted(options.pop("servers")) == ["nats://a:1", "nats://b:2"]
    assert options == {"user": user, "password": password, "token": token}


def test_credentials_that_are_given_otherwise_come_before_those_in_a_url() -> None:
    settings = BusSettings(url="nats://ada:secret@a:1", credentials=Credentials(user="bob", password="other"))
    assert settings.server_options == {"servers": ["nats://a:1"], "user": "bob", "password": "other", "token": None}


@pytest.mark.parametrize("url", ["a", "a:4222", "nats://a", "tls://a:1,nats://[::1]:4222", "nats://u:p@a:1"])
def test_a_broker_is_a_host_with_or_without_a_scheme_and_a_port(url: str) -> None:
    BusSettings(url=url).check()


def test_one_tls_url_means_tls_for_all() -> None:
    assert BusSettings(url="nats://a:1,tls://b:2").insists_on_tls
    assert not BusSettings(url="nats://a:1,nats://b:2").insists_on_tls


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nats://a:1,", "empty URL"),
        ("nats://ada:secret@a:1,nats://bob:secret@b:2", "different users"),
        ("nats://ada:sec,ret@a:1", "comma"),
        ("http://ada:secret@a:1", "must be nats://HOST:PORT or tls://HOST:PORT, got http://a:1"),
        ("nats://a:1,nats://b:70000", "got nats://b:70000"),
        ("nats://:4222", "got nats://:4222"),
    ],
)
def test_urls_that_contradict_each_other_are_refused_without_their_secrets(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        BusSettings(url=url).check()
    assert "sec" not in str(caught.value)
