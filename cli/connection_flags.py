"""The flags and variables that say how a process reaches the broker."""

import argparse
import os

from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.credentials import Credentials
from tokenbus.protocol.bus.tls import Tls
from tokenbus.protocol.wire import subjects

DEFAULT_URL = "nats://127.0.0.1:4222"
_FILE_FLAGS = (
    ("--nats-nkey", "a file with the seed of an nkey"),
    ("--nats-creds", "a credentials file"),
    ("--nats-ca", "a PEM file with the authority that signed the broker's certificate"),
    ("--nats-cert", "a PEM file with this process's own certificate"),
    ("--nats-key", "and its key"),
)


def add_nats_flags(parser: argparse.ArgumentParser) -> None:
    """Each flag has a variable: --nats-user is TOKENBUS_NATS_USER. Secrets have no flag, since others see those."""
    url = _variable("--nats") or DEFAULT_URL
    now = nats.redact_url(url).replace("%", "%%")
    parser.add_argument("--nats", metavar="URL", default=url, help=f"the broker (variable TOKENBUS_NATS; now {now})")
    parser.add_argument(
        "--nats-inbox",
        metavar="PREFIX",
        default=_variable("--nats-inbox") or nats.Settings().inbox_prefix,
        help="what this process's own reply subjects begin with (%(default)s)",
    )
    parser.add_argument(
        "--nats-user",
        metavar="NAME",
        default=_variable("--nats-user"),
        help="user; the password is the variable TOKENBUS_NATS_PASSWORD, a token TOKENBUS_NATS_TOKEN",
    )
    for flag, text in _FILE_FLAGS:
        parser.add_argument(flag, metavar="FILE", default=_variable(flag), help=text)


def settings_of(options: argparse.Namespace, connect_timeout_s: float = 10.0) -> nats.Settings:
    """What parsed flags mean. Raises ValueError for what contradicts itself, and for files that are no good."""
    credentials = Credentials(
        user=options.nats_user,
        password=_variable("--nats-password"),
        token=_variable("--nats-token"),
        nkey_file=options.nats_nkey,
        creds_file=options.nats_creds,
    )
    settings = nats.Settings(
        url=options.nats,
        inbox_prefix=options.nats_inbox,
        connect_timeout_s=connect_timeout_s,
        credentials=credentials,
        tls=Tls(options.nats_ca, options.nats_cert, options.nats_key),
    )
    settings.check()
    return settings


def settings_from_environment(url: str) -> nats.Settings:
    """Of that broker, as the processes reach it that are given its URL and else the variables of this one. Raises
    ValueError."""
    parser = argparse.ArgumentParser()
    add_nats_flags(parser)
    return settings_of(parser.parse_args(["--nats", url]))


def anonymous_flags() -> list[str]:
    """Those of a process whose broker asks for nothing, whatever the variables say."""
    return [part for flag in ("--nats-user", *(flag for flag, _ in _FILE_FLAGS)) for part in (flag, "")]


def _variable(flag: str) -> str:
    """`--nats-user` is TOKENBUS_NATS_USER."""
    return os.environ.get("TOKENBUS" + flag.removeprefix("-").replace("-", "_").upper(), "")


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of whoever speaks on the wire."""
    add_nats_flags(parser)
    parser.add_argument("--prefix", default=subjects.DEFAULT_PREFIX, help="prefix of all subjects (%(default)s)")
    parser.add_argument("--tenant", default=subjects.DEFAULT_TENANT, help="on whose behalf (%(default)s)")
