"""No secret is sent to a broker other than the one that was meant, and renewed secrets are used."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from tests.support import auth_brokers
from tests.support.auth_brokers import GUARDS, AuthSetup, CertificateAuthority, ClientAuth, guarded, settings
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.connection import BusSettings, redact_url
from tokenbus.protocol.bus.handshake import BrokerRefusedError
from tokenbus.protocol.bus.settings import Credentials

PATIENCE_S = 15.0
INFO = b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"headers":true}\r\n'


class Impostor:
    """Greets as a broker without TLS does, hears what it is told, and hangs up."""

    def __init__(self, info: bytes = INFO) -> None:
        self.info = info
        self.heard = b""
        self.url = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Impostor"]:
        server = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        async with server:
            self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.info)
        self.heard += await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_broker_without_the_tls_that_was_wanted_is_told_nothing() -> None:
    async with Impostor().listening() as impostor, asyncio.timeout(PATIENCE_S):
        url = impostor.url.replace("nats://", "tls://")
        with pytest.raises(BrokerRefusedError, match="does not speak TLS"):
            await connection.connect(BusSettings(url=url, credentials=Credentials(user="a", password="b")), "test")
        assert impostor.heard == b""


async def test_a_broker_that_hangs_up_without_an_answer_is_none() -> None:
    async with Impostor().listening() as impostor, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ConnectionError, match="no NATS broker at"):
            await connection.connect(BusSettings(url=impostor.url, connect_timeout_s=2.0), "test")
        assert impostor.heard.startswith(b"CONNECT ")


async def test_a_broker_that_asks_for_a_key_and_does_not_decide_is_not_said_to_be_absent() -> None:
    info = INFO.replace(b'"headers"', b'"auth_required":true,"headers"')
    async with Impostor(info).listening() as impostor, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ConnectionError, match=r"does not let this process in .* is `tokenbus auth` running"):
            await connection.connect(BusSettings(url=impostor.url, connect_timeout_s=0.5), "test")


async def test_tls_that_a_broker_offers_without_asking_for_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = CertificateAuthority(tmp_path, "ours")
    user = "authorization { users: [ { user: worker.example } ] }\nallow_non_tls: true"
    way = ClientAuth(ours.flags + ours.client_flags("worker.example"))
    async with guarded(AuthSetup(ours.server_config("verify_and_map: true") + user, way, {}), tmp_path) as system:
        made = await connection.connect(settings(system.url, way, monkeypatch), "test")
        await made.flush()
        await made.close()


@pytest.mark.parametrize("kind", ["nkey", "creds", "tls", "mutual tls"])
async def test_renewed_files_are_read_when_the_connection_is_made_again_and_bad_ones_until_they_are_good(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    guard, renewed = GUARDS[kind](old), GUARDS[kind](new)
    with structlog.testing.capture_logs() as logs:
        async with guarded(guard, tmp_path) as system, asyncio.timeout(PATIENCE_S):
            made = await connection.connect(settings(system.url, guard.right, monkeypatch), "test")
            again = asyncio.Event()
            made.on_reconnect = again.set
            guard.right.files[-1].write_text("half written")
            (tmp_path / "nats.conf").write_text(renewed.config)
            await system.restart_broker()
            while not any(str(guard.right.files[-1]) in str(line.get("error")) for line in logs):
                await asyncio.sleep(0.01)
            assert not again.is_set()
            for mine, theirs in zip(guard.right.files, renewed.right.files, strict=True):
                mine.write_text(theirs.read_text())
            await again.wait()
            await made.close()


async def test_credentials_that_expire_are_replaced_by_those_that_the_file_holds_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = auth_brokers.by_creds(tmp_path)
    shown, passing, renewed = (tmp_path / name for name in ("shown.creds", "passing.creds", "user.creds"))
    shown.write_text(passing.read_text())
    async with guarded(guard, tmp_path) as system, asyncio.timeout(PATIENCE_S):
        way = ClientAuth(("--nats-creds", str(shown)))
        made = await connection.connect(settings(system.url, way, monkeypatch), "test")
        again = asyncio.Event()
        made.on_reconnect = again.set
        shown.write_text(renewed.read_text())
        await again.wait()
        await made.flush()
        await made.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("tls://user:pass@word/@broker.example:4222", "tls://broker.example:4222"),
        ("token@127.0.0.1:4222", "127.0.0.1:4222"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert "pass" not in repr(BusSettings(url=url))


async def test_an_error_shows_no_secret_of_the_url() -> None:
    with pytest.raises(ConnectionError, match=r"no NATS broker at nats://127\.0\.0\.1:1 ") as caught:
        await connection.connect(BusSettings(url="nats://user:hidden@127.0.0.1:1", connect_timeout_s=0.1), "test")
    assert "hidden" not in str(caught.value)
