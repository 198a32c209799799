"""`tokenbus gateway`: the flags of one gateway and the settings they make."""

import argparse

from tokenbus.cli.console import arguments, config, connection_flags, serve
from tokenbus.gateway.admission import keys
from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.settings import GatewaySettings

_DEFAULTS = GatewaySettings()


def add_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    serve.add_status_flags(parser)
    parser.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=arguments.port, default=_DEFAULTS.port, help="port to listen on; 0: any free port (%(default)s)"
    )
    parser.add_argument("--fd", type=int, metavar="N", help="listen on this inherited socket instead of --port")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY=TENANT",
        help=f"API key and its tenant; may be repeated; safer in {keys.VARIABLE}, comma-separated",
    )
    parser.add_argument(
        "--tenant-inbox",
        metavar="PREFIX",
        default=_DEFAULTS.tenant_inbox,
        help="prefix of the tenants' reply subjects, e.g. _INBOX_{tenant}.gateway (same as --nats-inbox)",
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="another name for a model, or for several by weight: NAME=MODEL:9,OTHER:1; may be repeated",
    )
    parser.add_argument(
        "--default-model",
        metavar="NAME",
        default=_DEFAULTS.aliases.default,
        help="model or alias for requests that name no model; without it they are refused",
    )
    parser.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may use the gateway, e.g. https://chat.example.org, or *; may be repeated",
    )
    parser.add_argument(
        "--max-requests",
        type=arguments.whole(1),
        default=_DEFAULTS.max_requests,
        help="completions that may be open at a time (%(default)s)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=arguments.whole(0),
        metavar="N",
        default=_DEFAULTS.max_connections_per_address,
        help="HTTP connections per client address; 0: no limit, for use behind a proxy that sets its own (%(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=arguments.whole(1),
        metavar="N",
        default=_DEFAULTS.max_body_bytes,
        help="largest body of a completion (%(default)s)",
    )
    parser.add_argument(
        "--write-deadline-s",
        type=arguments.seconds,
        default=_DEFAULTS.write_deadline_s,
        help="close the connection of a client that reads nothing for this many seconds (%(default)s)",
    )
    parser.add_argument(
        "--grace-s",
        type=arguments.real(0, 86_400),
        default=_DEFAULTS.grace_s,
        help="seconds that open completions may take after SIGTERM (%(default)s)",
    )
    parser.set_defaults(run=run)


class SettingsFactory:
    """Makes one gateway's settings at its start and at each reload.

    A reload may change API keys but not remove the last one, which would open the gateway to everyone."""

    def __init__(self) -> None:
        self._had_keys = False

    def __call__(self, options: argparse.Namespace) -> GatewaySettings:
        """Raises ValueError for invalid settings."""
        settings = settings_of(options)
        if self._had_keys and settings.keys.allows_anonymous:
            raise ValueError(
                "api-key: removing the last key would let everyone in; restart the gateway if you want that"
            )
        self._had_keys = not settings.keys.allows_anonymous
        return settings


def settings_of(options: argparse.Namespace) -> GatewaySettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    return GatewaySettings(
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        host=options.host,
        port=options.port,
        fd=options.fd,
        tenant=options.tenant,
        tenant_inbox=options.tenant_inbox,
        keys=keys.ApiKeys(config.api_keys() + options.api_key, anonymous_tenant=options.tenant),
        aliases=Aliases(options.alias, options.default_model),
        allowed_origins=tuple(options.allowed_origin),
        max_requests=options.max_requests,
        max_connections_per_address=options.max_connections_per_address,
        max_body_bytes=options.max_body_bytes,
        write_deadline_s=options.write_deadline_s,
        status_page=serve.status_settings(options),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        grace_s=options.grace_s,
    )


def run(options: argparse.Namespace) -> int:
    from tokenbus.gateway import serve as gateway  # every server parses these flags; only a gateway needs this

    return serve.run("gateway", options, SettingsFactory(), gateway.serve)
