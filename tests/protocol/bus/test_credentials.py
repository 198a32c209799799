"""Credential and TLS files that can't be used are named in the error, and nothing of their content is shown."""

from collections.abc import Callable
from pathlib import Path

import nkeys
import pytest
import structlog

from tests.support.auth_brokers import AuthSetup, CertificateAuthority, ClientAuth, Key, creds, guarded, secret_file
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.connection import BusSettings
from tokenbus.protocol.bus.settings import Credentials, Tls

JWT = "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.e30.c2ln"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], str]:
    return lambda content: secret_file(tmp_path / "file", content)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_seed_is_read_however_its_line_ends(write: Callable[[str | bytes], str], end: str) -> None:
    key = Key()
    for content in (key.seed.decode() + end, f"-----BEGIN USER NKEY SEED-----{end or chr(10)}{key.seed.decode()}{end}"):
        keys = Credentials(nkey_file=write(content)).keys()
        assert keys is not None
        assert (keys.public, keys.jwt) == (key.public, "")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_credentials_file_holds_a_jwt_and_a_seed(write: Callable[[str | bytes], str], end: str) -> None:
    key = Key()
    keys = Credentials(creds_file=write(creds(JWT, key).replace("\n", end))).keys()
    assert keys is not None
    assert (keys.public, keys.jwt) == (key.public, JWT)
    assert key.seed.decode() not in repr(keys)


@pytest.mark.parametrize(
    "content",
    ["", "nothing", b"\xff\xfe\x00", Key().seed[:-3], Key().seed[:-8], Key(nkeys.PREFIX_BYTE_ACCOUNT).seed, "SU" * 29],
    ids=["empty", "a word", "no text", "3 too short", "8 too short", "an account's", "a wrong checksum"],
)
def test_a_file_without_a_user_s_seed_is_refused_by_name(
    write: Callable[[str | bytes], str], content: str | bytes
) -> None:
    path = write(content)
    for credentials in (Credentials(nkey_file=path), Credentials(creds_file=path)):
        with pytest.raises(ValueError, match=path) as caught:
            credentials.check()
        shown = content.decode(errors="replace") if isinstance(content, bytes) else content
        assert not shown or shown not in str(caught.value)


def test_a_credentials_file_without_a_jwt_is_refused_by_name(write: Callable[[str | bytes], str]) -> None:
    for content in (Key().seed, creds("", Key()), "-----BEGIN NATS USER JWT-----\n" + Key().seed.decode()):
        path = write(content)
        with pytest.raises(ValueError, match="has no user JWT"):
            Credentials(creds_file=path).check()


def test_half_of_what_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TOKENBUS_NATS_PASSWORD"):
        Credentials(user="acme").check()
    with pytest.raises(ValueError, match="only one"):
        Credentials(user="acme", password="x", token="t").check()
    with pytest.raises(ValueError, match="pass --nats-cert as well"):
        BusSettings(tls=Tls(key_file="key.pem")).check()


def test_files_of_tls_that_are_no_good_are_refused_by_name(tmp_path: Path) -> None:
    ours = CertificateAuthority(tmp_path, "ours")
    certificate, key = ours.issue("one.example")
    _, other_key = ours.issue("other.example")
    junk = secret_file(tmp_path / "junk", "junk")
    for tls, named in (
        (Tls(ca_file="/missing"), "/missing"),
        (Tls(ca_file=junk), junk),
        (Tls(cert_file="/missing", key_file=key), "/missing"),
        (Tls(cert_file=certificate, key_file="/missing"), "/missing"),
        (Tls(cert_file=certificate, key_file=other_key), other_key),
        (Tls(cert_file=certificate), certificate),
        (Tls(cert_file=junk, key_file=key), junk),
    ):
        with pytest.raises(ValueError, match=named):
            BusSettings(tls=tls).check()
    BusSettings(tls=Tls(ours.file, certificate, key)).check()


async def test_a_secret_that_everybody_can_read_is_told_of(tmp_path: Path) -> None:
    key = Key()
    guard = AuthSetup(f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}", ClientAuth(), {})
    path = tmp_path / "seed"
    path.write_bytes(key.seed)
    async with guarded(guard, tmp_path) as system:
        settings = BusSettings(url=system.url, credentials=Credentials(nkey_file=str(path)))
        for mode, told in ((0o644, [str(path)]), (0o640, [])):
            path.chmod(mode)
            assert settings.world_readable_files == told
            with structlog.testing.capture_logs() as logs:
                made = await connection.connect(settings, "test")
            assert [line["path"] for line in logs if line["event"] == "secret_exposed"] == told
            await made.close()
