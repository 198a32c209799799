"""`tokenbus gateway`: the flags of one gateway, and the settings that they make."""

import argparse

from tokenbus.cli import arguments, config, connection_flags
from tokenbus.gateway import keys
from tokenbus.gateway.settings import GatewaySettings
from tokenbus.protocol.telemetry import status

_DEFAULTS = GatewaySettings()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a gateway, beside those of the broker."""
    parser.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=arguments.port, default=_DEFAULTS.port, help="0 takes a free one (%(default)s)")
    parser.add_argument("--fd", type=int, metavar="N", help="listen on this inherited socket instead")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY=TENANT",
        help=f"who may ask, and on whose behalf; may be repeated; better in {keys.VARIABLE}, comma-separated",
    )
    parser.add_argument(
        "--tenant-inbox",
        metavar="PREFIX",
        default=_DEFAULTS.tenant_inbox,
        help="what reply subjects of the keys' tenants begin with, as _INBOX_{tenant}.gateway (as --nats-inbox)",
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=_DEFAULTS.max_requests,
        help="completions that are open at a time (%(default)s)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        default=_DEFAULTS.max_connections_per_address,
        help="HTTP connections of one client; 0 is no bound, for use behind a proxy that has one (%(default)s)",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=_DEFAULTS.grace_s,
        help="seconds for open completions after SIGTERM (%(default)s)",
    )


class SettingsFactory:
    """Makes the settings of one gateway, again and again. Keys may change while it serves, and not all vanish."""

    def __init__(self) -> None:
        self._had_keys = False

    def __call__(self, options: argparse.Namespace) -> GatewaySettings:
        """Raises ValueError for what can't be."""
        settings = settings_of(options)
        if self._had_keys and settings.keys.allows_anonymous:
            raise ValueError(
                "api-key: without any everybody may ask; a gateway that had keys must be started anew for it"
            )
        self._had_keys = not settings.keys.allows_anonymous
        return settings


def settings_of(options: argparse.Namespace) -> GatewaySettings:
    """What parsed flags mean. Raises ValueError for what can't be."""
    if options.max_requests < 1:
        raise ValueError(f"--max-requests must be at least 1, got {options.max_requests}")
    if options.max_connections_per_address < 0:
        raise ValueError(f"--max-connections-per-address must be at least 0, got {options.max_connections_per_address}")
    if not 0 <= options.grace_s <= 86_400:
        raise ValueError(f"--grace-s must be 0 to 86400, got {options.grace_s:g}")
    return GatewaySettings(
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        host=options.host,
        port=options.port,
        fd=options.fd,
        tenant=options.tenant,
        tenant_inbox=options.tenant_inbox,
        keys=keys.ApiKeys(config.api_keys() + options.api_key, anonymous_tenant=options.tenant),
        max_requests=options.max_requests,
        max_connections_per_address=options.max_connections_per_address,
        status_page=status.Settings(options.metrics_host, options.metrics_port),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        grace_s=options.grace_s,
    )
