"""Brokers with every kind of NATS authentication, and clients with right and wrong credentials for them."""

import base64
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nkeys
import pytest
import trustme

from tests.support.system import System
from tokenbus.cli.console import connection_flags
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.bus import connection


class ClientAuth(NamedTuple):
    """The flags and secrets with which a client authenticates."""

    flags: tuple[str, ...] = ()
    token: str = ""

    @property
    def variables(self) -> dict[str, str]:
        return {"TOKENBUS_NATS_TOKEN": self.token} if self.token else {}

    @property
    def files(self) -> list[Path]:
        return [Path(path) for path in self.flags[1::2]]

    def secrets(self) -> Iterator[str]:
        """Yields the secrets, which no output may contain."""
        yield from self.variables.values()
        for path in self.files:
            yield from (line for line in path.read_text().splitlines() if len(line) > 20 and " " not in line)


class WrongAuth(NamedTuple):
    way: ClientAuth
    said: str
    """Part of the error line that the client prints."""


class AuthSetup(NamedTuple):
    config: str
    """The broker's configuration file."""
    right: ClientAuth
    wrong: dict[str, WrongAuth]


class Key:
    """An nkey with a role: operator, account or user."""

    def __init__(self, prefix: int = nkeys.PREFIX_BYTE_USER) -> None:
        self.seed = nkeys.encode_seed(secrets.token_bytes(32), prefix)
        self._pair = nkeys.from_seed(self.seed)
        self.public = str(self._pair.public_key.decode())

    def jwt(self, subject: "Key", kind: str, expires_s: float | None = None, **claims: object) -> str:
        """Returns a JWT (version 2 of NATS's) in which this key vouches for another."""
        body: dict[str, object] = {"jti": secrets.token_hex(8), "iat": int(time.time()), "iss": self.public}
        body |= {"sub": subject.public, "name": kind, "nats": {"type": kind, "version": 2} | claims}
        if expires_s is not None:
            body["exp"] = int(time.time() + expires_s)
        said = ".".join(map(_part, (json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}), json.dumps(body))))
        return f"{said}.{_part(self._pair.sign(said.encode()))}"


def _part(content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def secret_file(path: Path, content: str | bytes) -> str:
    """Writes a file that only its owner can read; returns its path."""
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def by_token(folder: Path) -> AuthSetup:
    token = secrets.token_hex(16)
    return AuthSetup(
        f'authorization {{ token: "{token}" }}',
        ClientAuth(token=token),
        {
            "another token": WrongAuth(ClientAuth(token=secrets.token_hex(16)), "TOKENBUS_NATS_TOKEN"),
            "nothing": WrongAuth(ClientAuth(), "pass --nats-user"),
        },
    )


def by_nkey(folder: Path) -> AuthSetup:
    known, stranger = Key(), Key()
    return AuthSetup(
        f"authorization {{ users: [ {{ nkey: {known.public} }} ] }}",
        ClientAuth(("--nats-nkey", secret_file(folder / "known.nk", known.seed + b"\n"))),
        {
            "another key": WrongAuth(
                ClientAuth(("--nats-nkey", secret_file(folder / "stranger.nk", stranger.seed))), "public key"
            )
        },
    )


def creds(jwt: str, user: Key) -> str:
    """Returns a credentials file in nsc's format."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


def by_creds(folder: Path) -> AuthSetup:
    operator, account = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    other_account, user = Key(nkeys.PREFIX_BYTE_ACCOUNT), Key()
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    jwt = operator.jwt(account, "account", limits=unlimited | {"wildcards": True})

    def way(name: str, by: Key, expires_s: float | None = None) -> ClientAuth:
        signed = by.jwt(user, "user", expires_s, pub={}, sub={}, subs=-1, data=-1, payload=-1)
        return ClientAuth(("--nats-creds", secret_file(folder / name, creds(signed, user))))

    way("passing.creds", account, 2)
    return AuthSetup(
        f"operator: {operator.jwt(operator, 'operator')}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {jwt} }}",
        way("user.creds", account),
        {
            "of another account": WrongAuth(way("other.creds", other_account), "still valid?"),
            "expired": WrongAuth(way("expired.creds", account, -10), "still valid?"),
        },
    )


class CertificateAuthority:
    """Signs certificates and writes them to files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA()
        self.file = secret_file(folder / f"{name}.pem", self._ca.cert_pem.bytes())

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--nats-ca", self.file)

    def issue(self, whose: str) -> tuple[str, str]:
        """Writes a certificate and its key; returns the paths."""
        leaf = self._ca.issue_cert(whose)
        base = self._folder / f"{self._name}-{whose}"
        certificate = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        return (
            secret_file(base.with_suffix(".cert"), certificate),
            secret_file(base.with_suffix(".key"), leaf.private_key_pem.bytes()),
        )

    def client_flags(self, whose: str) -> tuple[str, ...]:
        certificate, key = self.issue(whose)
        return ("--nats-cert", certificate, "--nats-key", key)

    def server_config(self, options: str = "", host: str = "127.0.0.1") -> str:
        certificate, key = self.issue(host)
        return f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{self.file}", {options} }}\n'


def by_tls(folder: Path) -> AuthSetup:
    ours, other = CertificateAuthority(folder, "ours"), CertificateAuthority(folder, "other")
    return AuthSetup(
        ours.server_config(),
        ClientAuth(ours.flags),
        {
            "another authority": WrongAuth(ClientAuth(other.flags), "pass --nats-ca FILE"),
            "no authority": WrongAuth(ClientAuth(), "pass --nats-ca FILE"),
        },
    )


def by_tls_of_another_name(folder: Path) -> AuthSetup:
    ours = CertificateAuthority(folder, "ours")
    mistake = WrongAuth(ClientAuth(ours.flags), "a name that is in it")
    return AuthSetup(ours.server_config(host="broker.example"), ClientAuth(ours.flags), {"right": mistake})


def by_mutual_tls(folder: Path) -> AuthSetup:
    ours, other = CertificateAuthority(folder, "ours"), CertificateAuthority(folder, "other")
    return AuthSetup(
        ours.server_config("verify: true"),
        ClientAuth(ours.flags + ours.client_flags("worker.example")),
        {
            "no certificate": WrongAuth(ClientAuth(ours.flags), "pass --nats-cert FILE and --nats-key FILE"),
            "a stranger's certificate": WrongAuth(
                ClientAuth(ours.flags + other.client_flags("worker.example")), "see --nats-cert and --nats-key"
            ),
        },
    )


def by_mapped_tls(folder: Path) -> AuthSetup:
    ours = CertificateAuthority(folder, "ours")
    return AuthSetup(
        ours.server_config("verify_and_map: true") + "authorization { users: [ { user: worker.example } ] }",
        ClientAuth(ours.flags + ours.client_flags("worker.example")),
        {
            "another user": WrongAuth(
                ClientAuth(ours.flags + ours.client_flags("other.example")), "refuses the credentials"
            )
        },
    )


def by_nothing(folder: Path) -> AuthSetup:
    ours = CertificateAuthority(folder, "ours")
    return AuthSetup("", ClientAuth(), {"TLS": WrongAuth(ClientAuth(ours.flags), "does not speak TLS")})


Make = Callable[[Path], AuthSetup]
GUARDS: dict[str, Make] = {
    "token": by_token,
    "nkey": by_nkey,
    "creds": by_creds,
    "tls": by_tls,
    "mutual tls": by_mutual_tls,
    "mapped tls": by_mapped_tls,
}


@contextlib.asynccontextmanager
async def guarded(guard: AuthSetup, folder: Path) -> AsyncIterator[System]:
    """Runs a broker with this authentication; yields a system without routers and workers."""
    config = folder / "nats.conf"
    config.write_text(guard.config)
    system = await System.start(folder, config)
    try:
        yield system
    finally:
        await system.stop()


def settings(url: str, way: ClientAuth, monkeypatch: pytest.MonkeyPatch) -> connection.BusSettings:
    """Returns the connection settings for these flags. The timeout is long, so only a refusal ends it soon."""
    for name, value in way.variables.items():
        monkeypatch.setenv(name, value)
    parser = Parser()
    connection_flags.add_flags(parser)
    return connection_flags.settings_of(parser.parse_args(["--nats", url, *way.flags]), connect_timeout_s=60)
