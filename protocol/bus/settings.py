"""The address of the broker, and how to connect to it."""

import dataclasses
import random
import re
from typing import Any

from tokenbus.protocol.bus.credentials import Credentials, is_world_readable
from tokenbus.protocol.bus.tls import Tls

_COMMA_BEFORE_SCHEME = re.compile(r",(?=\s*\w+://)")


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
            raise ValueError(f"--nats has an empty URL: {self.redacted_url}")
        if any("@" in url and "://" not in url for url in self._urls[1:]):
            raise ValueError("--nats: begin each URL with nats://, and set a password with a comma otherwise")
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


def redact_url(url: str) -> str:
    """Returns comma-separated broker URLs without user, password and token."""
    # A comma in a password does not end a URL here, so that the rest of the password is not shown either.
    return ",".join(_split(one)[0] for one in _COMMA_BEFORE_SCHEME.split(url))


def _split(url: str) -> tuple[str, str]:
    """Splits a URL into one without user, password or token, and the part removed."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    login, _, host = rest.rpartition("@")
    return scheme + mark + host, login
