"""The TLS files of a process's connection to the broker."""

import contextlib
import dataclasses
import ssl
from collections.abc import Iterator
from pathlib import Path


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
