"""The environment variables that say how a process reaches its broker: that of the flag `--nats-user` is
TOKENBUS_NATS_USER."""

import os

from tokenbus.protocol.bus.settings import BusSettings, Credentials, Tls


def variable(flag: str) -> str:
    """Returns the value of a flag's environment variable, or an empty string."""
    return os.environ.get("TOKENBUS" + flag.removeprefix("-").replace("-", "_").upper(), "")


def url() -> str:
    """Returns the broker's address: TOKENBUS_NATS, or that of a broker on this machine."""
    return variable("--nats") or BusSettings().url


def inbox_prefix() -> str:
    """Returns the first tokens of the process's own reply subjects."""
    return variable("--nats-inbox") or BusSettings().inbox_prefix


def credentials() -> Credentials:
    """Returns the identity that the variables give the process."""
    return Credentials(
        user=variable("--nats-user"),
        password=variable("--nats-password"),
        token=variable("--nats-token"),
        nkey_file=variable("--nats-nkey"),
        creds_file=variable("--nats-creds"),
    )


def tls() -> Tls:
    """Returns the TLS files that the variables name."""
    return Tls(variable("--nats-ca"), variable("--nats-cert"), variable("--nats-key"))
