"""Where the broker is, and how to connect to it."""

import dataclasses

from tokenbus.protocol.bus.credentials import Credentials, is_world_readable
from tokenbus.protocol.bus.tls import Tls


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one process's connection to the broker."""

    url: str = dataclasses.field(default="nats://127.0.0.1:4222", repr=False)
    """May contain a user and password or a token; show `redacted_url` instead."""
    inbox_prefix: str = "_INBOX"
    """First tokens of the process's own reply subjects."""
    credentials: Credentials = dataclasses.field(default_factory=Credentials)
    tls: Tls = dataclasses.field(default_factory=Tls)
    connect_timeout_s: float = 10.0
    """Time for the first connect, including retries. Later reconnects are retried for ever."""
    max_pending_bytes: int = 32 * 1024 * 1024
    """Bytes that may wait for a broker that is slow or absent."""

    @property
    def redacted_url(self) -> str:
        """The URL without secrets."""
        return redact_url(self.url)

    @property
    def world_readable_files(self) -> list[str]:
        """Those of the secret files that every user of this machine can read."""
        files = (self.credentials.nkey_file, self.credentials.creds_file, self.tls.key_file or self.tls.cert_file)
        return [path for path in files if path and is_world_readable(path)]

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other, and for files that can't be used."""
        if "," in self.url:
            raise ValueError("--nats takes one URL; the broker itself announces the other servers of its cluster")
        self.credentials.check()
        if self.tls.is_enabled:
            self.tls.context()


def redact_url(url: str) -> str:
    """Returns a broker's URL without user, password and token."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    return scheme + mark + rest.rpartition("@")[2]
