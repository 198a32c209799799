"""`tokenbus auth`: the flags of one instance and the settings they make; and `tokenbus auth-init`."""

import argparse
import dataclasses
import sys
from pathlib import Path

from tokenbus.auth import broker_config, seeds
from tokenbus.auth.settings import AuthSettings
from tokenbus.cli.console import audit_flags, connection_flags, key_flags, serve
from tokenbus.cli.console.arguments import FILE, NAME, text
from tokenbus.cli.console.flags import Parser, fields_of
from tokenbus.protocol.access.key_source import BUCKET
from tokenbus.protocol.bus import environment
from tokenbus.protocol.bus.settings import Credentials
from tokenbus.protocol.wire import subjects

_DEFAULTS = AuthSettings()


def add_flags(parser: Parser) -> None:
    flag = parser.group("connects", AuthSettings)
    flag("--seeds", FILE, "file of `tokenbus auth-init`; all instances have the same", str(_DEFAULTS.seeds))
    flag("--account", NAME, "account of the broker that clients are let into", _DEFAULTS.account)
    system = "user of the broker's system account, with the password of --nats-user"
    flag("--system-user", NAME, system, "", unset="as --nats-user, with -system after it")
    key_flags.add_flags(parser)
    parser.change_default("keys", BUCKET)
    audit_flags.add_flags(parser)
    serve.add_flags(parser)
    parser.set_defaults(run=run)


def settings_of(options: argparse.Namespace) -> AuthSettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    broker = connection_flags.settings_of(options)
    fields = fields_of(AuthSettings, options) | {"seeds": Path(options.seeds)}
    return AuthSettings(
        broker=broker,
        system_broker=dataclasses.replace(broker, credentials=_system_credentials(options, broker.credentials)),
        key_settings=key_flags.settings_of(options),
        audit_settings=audit_flags.settings_of(options),
        status_page=serve.status_settings(options),
        **fields,
    )


def _system_credentials(options: argparse.Namespace, own: Credentials) -> Credentials:
    """Raises ValueError if there are none."""
    user = options.system_user or (f"{own.user}-system" if own.user else "")
    password = environment.variable("--nats-password")
    if not user or not password:
        raise ValueError(
            "a broker asks for keys in its system account: pass --nats-user auth (as in the configuration that "
            "`tokenbus auth-init` prints), and set TOKENBUS_NATS_PASSWORD"
        )
    return Credentials(user=user, password=password)


def run(options: argparse.Namespace) -> int:
    from tokenbus.auth import serve as auth  # every server parses these flags; only this one needs it

    return serve.run("auth", options, settings_of, auth.serve)


def add_auth_init_flags(parser: Parser) -> None:
    parser.add_argument("seeds", metavar="FILE", help="file for the seeds, which is made unless it is there")
    flag = parser.group("options")
    flag("--prefix", text("PREFIX"), "prefix of all subjects", subjects.DEFAULT_PREFIX)
    parser.set_defaults(run=run_auth_init)


def run_auth_init(options: argparse.Namespace) -> int:
    """Makes the seeds, and prints the broker's configuration, which has only public keys."""
    subjects.Subjects(options.prefix)
    found = seeds.create(Path(options.seeds))
    print(broker_config.broker_config(found, options.prefix), end="")
    print(
        f"tokenbus: the seeds are in {options.seeds}: every `tokenbus auth` needs them, and no one else\n"
        "tokenbus: with this configuration a broker listens on all addresses, without TLS; its comments change that",
        file=sys.stderr,
    )
    return 0
