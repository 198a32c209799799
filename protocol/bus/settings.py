"""The address of the broker, and how to connect to it: settings, the identity of a process, and its TLS files."""

import base64
import contextlib
import dataclasses
import itertools
import os
import random
import re
import ssl
import stat
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_JWT_BEGINS = "BEGIN NATS USER JWT"
_SEED_BEGINS = "SU"
"""The seed of a user: an account's begins with SA, an operator's with SO."""
_SCHEMES = ("nats", "tls")
_COMMA_BEFORE_SCHEME = re.compile(r",(?=\s*\w+://)")


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a user: the seed of an nkey, and a JWT if an account has issued one."""

    seed: bytes = dataclasses.field(repr=False)
    jwt: str = dataclasses.field(default="", repr=False)

    @property
    def public(self) -> str:
        """The public key. Raises ValueError for an invalid seed."""
        import nkeys  # imports cryptography that most processes don't need

        try:
            return str(nkeys.from_seed(self.seed).public_key.decode())
        except (nkeys.NkeysError, ValueError) as error:
            raise ValueError("not the seed of an nkey") from error

    def sign(self, nonce: str) -> bytes:
        """Signs a broker's nonce, in the form that nats-py sends."""
        import nkeys

        return base64.b64encode(nkeys.from_seed(self.seed).sign(nonce.encode()))


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Credentials in one of NATS's forms; all empty for a broker without authentication."""

    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    nkey_file: str = ""
    """A file with the seed of an nkey."""
    creds_file: str = ""
    """A file with a user's JWT and seed, in the form that nsc writes."""

    def check(self) -> None:
        """Raises ValueError for more than one form, a user without a password, or an unusable file."""
        given = [bool(self.user), bool(self.token), bool(self.nkey_file), bool(self.creds_file)]
        if sum(given) > 1:
            raise ValueError("give only one of a NATS user, token, nkey file and credentials file")
        if self.user and not self.password:
            raise ValueError(f"the NATS user {self.user} has no password: set the variable TOKENBUS_NATS_PASSWORD")
        self.keys()

    def keys(self) -> Keys | None:
        """Reads the file, if there is one. Raises ValueError, which names the file but reveals none of its content."""
        path = self.creds_file or self.nkey_file
        if not path:
            return None
        lines = _lines(path)
        seed = next((line for line in lines if line.startswith(_SEED_BEGINS)), "")
        keys = Keys(seed.encode(), _jwt_of(lines) if self.creds_file else "")
        try:
            assert keys.public
        except ValueError as error:
            raise ValueError(f"{path} has no seed of a user's nkey: a line of SU and 56 more characters") from error
        if self.creds_file and not keys.jwt:
            raise ValueError(
                f"{path} has no user JWT: nsc writes one beside the seed; pass a seed alone as --nats-nkey"
            )
        return keys


def is_world_readable(path: str) -> bool:
    """Whether every user of this machine can read a file."""
    return os.name == "posix" and os.path.exists(path) and bool(os.stat(path).st_mode & stat.S_IROTH)


def _lines(path: str) -> list[str]:
    try:
        return [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: the NATS credentials can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: NATS credentials must be a text file") from error


def _jwt_of(lines: list[str]) -> str:
    """Returns the line below the JWT's heading, if it looks like a JWT."""
    below = (line for heading, line in itertools.pairwise(lines) if _JWT_BEGINS in heading)
    return next((line for line in below if line.count(".") == 2), "")


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files; all empty for a broker without TLS, or one whose certificate the system trusts (`tls://` URLs)."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    """Not needed if the key is in `cert_file`."""

    @property
    def is_enabled(self) -> bool:
        return bool(self.ca_file or self.cert_file or self.key_file)

    def context(self) -> ssl.SSLContext:
        """Reads the files. Raises ValueError naming an unusable one."""
        if self.key_file and not self.cert_file:
            raise ValueError("--nats-key needs its certificate: pass --nats-cert as well")
        for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            _check_readable(path)
        with _named(f"{self.ca_file} has no certificate of an authority in PEM"):
            context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.cert_file:
            files = " and ".join(filter(None, (self.cert_file, self.key_file)))
            with _named(f"{files} must be a certificate and its key, in PEM"):
                context.load_cert_chain(self.cert_file, self.key_file or None, password=_refuse_to_ask)
        return context


def _check_readable(path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ValueError(f"{path}: this TLS file can't be read: {error.strerror}") from error


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ValueError(f"{what} ({error.reason or error})") from error


def _refuse_to_ask() -> str:
    """Keeps OpenSSL from prompting for a passphrase, which would block the process."""
    raise ValueError("the key of --nats-key has a passphrase: servers need a key without one")


@dataclasses.dataclass(frozen=True)
class BusSettings:
    """Settings of one process's connection to the broker."""

    url: str = dataclasses.field(default="nats://127.0.0.1:4222", repr=False)
    """One URL, or those of several servers of one cluster, separated by commas. May contain a user and password or a
    token; show `redacted_url` instead."""
    inbox_prefix: str = "_INBOX"
    """First tokens of the process's own reply subjects."""
    credentials: Credentials = dataclasses.field(default_factory=Credentials)
    tls: Tls = dataclasses.field(default_factory=Tls)
    connect_timeout_s: float = 10.0
    """Time for the first connect, including retries. Later reconnects are retried forever."""
    max_pending_bytes: int = 32 * 1024 * 1024
    """Bytes that may be queued for a slow or absent broker."""

    @property
    def redacted_url(self) -> str:
        """The URLs without secrets."""
        return redact_url(self.url)

    @property
    def server_options(self) -> dict[str, Any]:
        """The servers, in any order, and the user, as arguments of nats-py's `connect`.

        A user named by the URL is used at every server, including those that the cluster announces later."""
        given = self.credentials
        user, password, token = given.user, given.password, given.token
        if not (user or token) and (found := self._logins):
            user, _, password = found[0].partition(":")
            if not password:
                user, token = "", user
        servers = random.sample(self._servers, len(self._servers))
        return {"servers": servers, "user": user or None, "password": password or None, "token": token or None}

    @property
    def secret(self) -> str:
        """The token or the password, or an empty string."""
        options = self.server_options
        return options["token"] or options["password"] or ""

    @property
    def insists_on_tls(self) -> bool:
        """Whether nothing may be sent to a server without TLS."""
        return self.tls.is_enabled or any(url.startswith("tls://") for url in self._servers)

    @property
    def world_readable_files(self) -> list[str]:
        """The secret files that every user of this machine can read."""
        files = (self.credentials.nkey_file, self.credentials.creds_file, self.tls.key_file or self.tls.cert_file)
        return [path for path in files if path and is_world_readable(path)]

    def check(self) -> None:
        """Raises ValueError for contradictory settings and unusable files."""
        if not all(self._servers):
            raise ValueError(f"--nats has an empty URL: {self.redacted_url!r}")
        if any("@" in url and "://" not in url for url in self._urls[1:]):
            raise ValueError("--nats: begin each URL with nats://, and set a password with a comma otherwise")
        for url in self._servers:  # only now: parts of a password with a comma are no servers to show
            _check_address(url)
        if len(set(self._logins)) > 1:
            raise ValueError("the URLs of --nats name different users: all servers must be of one cluster")
        self.credentials.check()
        if self.tls.is_enabled:
            self.tls.context()

    @property
    def _urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")]

    @property
    def _servers(self) -> list[str]:
        return [_split(url)[0] for url in self._urls]

    @property
    def _logins(self) -> list[str]:
        return [login for _, login in map(_split, self._urls) if login]


def _check_address(url: str) -> None:
    """Raises ValueError for a URL, without its login, that can't be that of a broker."""
    scheme = url.partition("://")[0] if "://" in url else "nats"
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"nats://{url}")
        is_valid = scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or above 65,535
        is_valid = False
    if not is_valid:
        raise ValueError(f"a broker's URL must be nats://HOST:PORT or tls://HOST:PORT, got {url}")


def redact_url(url: str) -> str:
    """Returns comma-separated broker URLs without user, password and token."""
    # A comma in a password does not end a URL here, so that the rest of the password is not shown either.
    return ",".join(_split(one)[0] for one in _COMMA_BEFORE_SCHEME.split(url))


def _split(url: str) -> tuple[str, str]:
    """Splits a URL into one without user, password or token, and the part removed."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    login, _, host = rest.rpartition("@")
    return scheme + mark + host, login
