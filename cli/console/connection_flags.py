"""The flags and environment variables that say how a process connects to the broker."""

import argparse

from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus import environment
from tokenbus.protocol.bus.credentials import Credentials
from tokenbus.protocol.bus.tls import Tls
from tokenbus.protocol.wire import subjects

_FILE_FLAGS = (
    ("--nats-nkey", "file with the seed of an nkey"),
    ("--nats-creds", "credentials file (a JWT and its seed)"),
    ("--nats-ca", "PEM file with the authority that signed the broker's certificate"),
    ("--nats-cert", "PEM file with this process's own certificate"),
    ("--nats-key", "PEM file with the key of that certificate"),
)


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that talks to a Tokenbus system."""
    add_flags(parser)
    parser.add_argument("--prefix", default=subjects.DEFAULT_PREFIX, help="prefix of all subjects (%(default)s)")
    parser.add_argument("--tenant", default=subjects.DEFAULT_TENANT, help="tenant to send requests as (%(default)s)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the connection itself. Each has a variable: that of --nats-user is TOKENBUS_NATS_USER.

    Passwords and tokens have no flag, because every user of the machine can read a process's command line."""
    url = environment.url()
    now = nats.redact_url(url).replace("%", "%%")
    text = f"the broker, or servers of a cluster, comma-separated (variable TOKENBUS_NATS; now {now})"
    parser.add_argument("--nats", metavar="URL", default=url, help=text)
    parser.add_argument(
        "--nats-inbox",
        metavar="PREFIX",
        default=environment.inbox_prefix(),
        help="prefix of this process's own reply subjects (%(default)s)",
    )
    parser.add_argument(
        "--nats-user",
        metavar="NAME",
        default=environment.variable("--nats-user"),
        help="user name; set the password in TOKENBUS_NATS_PASSWORD, or a token in TOKENBUS_NATS_TOKEN",
    )
    for flag, text in _FILE_FLAGS:
        parser.add_argument(flag, metavar="FILE", default=environment.variable(flag), help=text)


def settings_of(options: argparse.Namespace, connect_timeout_s: float = 10.0) -> nats.BusSettings:
    """Returns the connection settings that parsed flags describe.

    Raises ValueError for flags that contradict each other and for files that can't be used."""
    credentials = Credentials(
        user=options.nats_user,
        password=environment.variable("--nats-password"),
        token=environment.variable("--nats-token"),
        nkey_file=options.nats_nkey,
        creds_file=options.nats_creds,
    )
    settings = nats.BusSettings(
        url=options.nats,
        inbox_prefix=options.nats_inbox,
        connect_timeout_s=connect_timeout_s,
        credentials=credentials,
        tls=Tls(options.nats_ca, options.nats_cert, options.nats_key),
    )
    settings.check()
    return settings


def settings_from_environment(url: str) -> nats.BusSettings:
    """Returns the settings of a child process that is given this URL and inherits our variables. Raises ValueError."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return settings_of(parser.parse_args(["--nats", url]))


def anonymous_flags() -> list[str]:
    """Returns flags that make a process connect without credentials, whatever its environment says."""
    return [part for flag in ("--nats-user", *(flag for flag, _ in _FILE_FLAGS)) for part in (flag, "")]
