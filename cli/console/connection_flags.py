"""The flags and environment variables that say how a process connects to the broker."""

import argparse

from tokenbus.cli.console.arguments import FILE, NAME, URL, ArgumentType, text
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus import environment
from tokenbus.protocol.bus.settings import Credentials, Tls
from tokenbus.protocol.wire import subjects

_FILES = (
    ("--nats-nkey", "file with the seed of an nkey"),
    ("--nats-creds", "credentials file (a JWT and its seed)"),
    ("--nats-ca", "PEM file with the authority that signed the broker's certificate"),
    ("--nats-cert", "PEM file with this process's own certificate"),
    ("--nats-key", "PEM file with the key of that certificate"),
)


def add_flags(parser: Parser) -> None:
    """Adds the flags of every command that talks to a Tokenbus system. Help shows them last.

    Passwords and tokens have no flag, because every user of the machine can read a process's command line."""
    bus, connection = nats.BusSettings(), parser.group("connection")

    def flag(option: str, kind: ArgumentType, text: str, default: str = "") -> None:
        connection(option, kind, text, default, variable="TOKENBUS" + option[1:].replace("-", "_").upper())

    flag("--nats", URL, "the broker, or servers of one cluster with commas between them", bus.url)
    flag("--nats-inbox", text("PREFIX"), "prefix of this process's own reply subjects", bus.inbox_prefix)
    flag("--nats-user", NAME, "its user; set the password in TOKENBUS_NATS_PASSWORD, or a token in TOKENBUS_NATS_TOKEN")
    for option, meaning in _FILES:
        flag(option, FILE, meaning)
    connection("--prefix", text("PREFIX"), "prefix of all subjects", subjects.DEFAULT_PREFIX)
    connection("--tenant", NAME, "tenant to send requests as", subjects.DEFAULT_TENANT)


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


def anonymous_flags() -> list[str]:
    """Returns flags that make a process connect without credentials, regardless of its environment."""
    return [f"{option}=" for option in ("--nats-user", *(option for option, _ in _FILES))]
