"""The options of a client's connection, and where those come from that are not given."""

from typing import Literal, TypedDict

from tokenbus.protocol.bus import environment
from tokenbus.protocol.bus.settings import BusSettings, Credentials, Tls
from tokenbus.protocol.telemetry import tracing


class ConnectOptions(TypedDict, total=False):
    """The options of `Client` and `SyncClient`.

    Credentials and TLS files that are not given come from the variables that the command line reads, TOKENBUS_NATS_USER
    and so on; a given identity replaces all of theirs."""

    tenant: str
    """The tenant whose requests they are (`default`)."""
    prefix: str
    """The prefix of all subjects (`tokenbus`)."""
    user: str
    password: str
    token: str
    nkey_file: str
    """A file with the seed of an nkey."""
    creds_file: str
    """A credentials file, with a JWT and its seed."""
    ca_file: str
    """A PEM file with the authority that signed the broker's certificate."""
    cert_file: str
    """A PEM file with this process's own certificate."""
    key_file: str
    """A PEM file with the key of that certificate."""
    inbox_prefix: str
    """The first tokens of reply subjects, if the broker allows this user only some."""
    connect_timeout_s: float
    """Time for the first connect, including retries (10). Later the connection is restored by itself."""
    encoding: Literal["json", "msgpack"]
    """The form of the messages (`json`)."""
    tracer: tracing.Tracer | None
    """Records a span for each request: `opentelemetry.trace.get_tracer(...)` in a traced application."""


def settings_of(url: str | None, options: ConnectOptions) -> BusSettings:
    """Returns the settings of the connection. Raises ValueError for options that contradict each other, and for files
    that can't be used."""
    given = Credentials(
        user=options.get("user", ""),
        password=options.get("password", ""),
        token=options.get("token", ""),
        nkey_file=options.get("nkey_file", ""),
        creds_file=options.get("creds_file", ""),
    )
    files = Tls(options.get("ca_file", ""), options.get("cert_file", ""), options.get("key_file", ""))
    settings = BusSettings(
        url=url or environment.url(),
        inbox_prefix=options.get("inbox_prefix") or environment.inbox_prefix(),
        credentials=environment.credentials() if given == Credentials() else given,
        tls=files if files.is_enabled else environment.tls(),
        connect_timeout_s=options.get("connect_timeout_s", BusSettings.connect_timeout_s),
    )
    settings.check()
    return settings
