"""`tokenbus gateway`: the flags of one gateway and the settings they make."""

import argparse

from tokenbus.cli.console import audit_flags, config, connection_flags, key_flags, serve
from tokenbus.cli.console.arguments import COUNT, INTERVAL, NAME, PORT, SECONDS, SWITCH, URL, real, text, whole
from tokenbus.cli.console.flags import Parser, fields_of
from tokenbus.gateway.admission import keys
from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.settings import GatewaySettings, OidcSettings
from tokenbus.protocol import extras

_DEFAULTS = GatewaySettings()
_MONTH_S = 30 * 86_400


def add_flags(parser: Parser) -> None:
    flag = parser.group("HTTP", _DEFAULTS)
    flag("--host", text("ADDRESS"), "address to listen on")
    flag("--port", PORT, "port to listen on; 0: any free port")
    flag("--fd", COUNT, "listen on this inherited socket instead of --port")
    origin = "origin whose web pages may use the gateway, e.g. https://chat.example.org, or *"
    flag("--allowed-origin --allowed-origins", text("ORIGIN"), origin, [])
    flag = parser.group("models")
    flag("--alias", text("NAME=MODEL"), "another name for a model, or for several by weight: NAME=MODEL:9,OTHER:1", [])
    flag("--default-model", NAME, "model or alias for requests that name no model", "", unset="they are refused")
    flag = parser.group("tenants", _DEFAULTS)
    key = f"API key and its tenant (that of --tenant); safer in {keys.VARIABLE}, with commas between them"
    flag("--api-key", text("KEY[=TENANT]"), key, [], reloads=True, secret=True)
    inbox = "prefix of the tenants' reply subjects, e.g. _INBOX_{tenant}.gateway"
    flag("--tenant-inbox", text("PREFIX"), inbox, unset="--nats-inbox")
    flag = key_flags.add_flags(parser)
    flag("--revoke-ends-streams", SWITCH, "end the open streams of a key that is revoked")
    operate = "let operators load, unload and drain workers and change keys at /console/ (see docs/security.md)"
    flag("--console-operate", SWITCH, operate)
    audit_flags.add_flags(parser)
    flag = parser.group("OpenID Connect")
    issuer = "issuer whose tokens are taken as keys, e.g. https://login.example.org; needs the extra `oidc`"
    flag("--oidc-issuer", URL, issuer, "")
    flag("--oidc-audience", NAME, "audience that a token must have: the name of this service at the issuer", "")
    flag("--oidc-tenant-claim", NAME, "claim that names the tenant, e.g. tenant", "", unset="all are of --tenant")
    role = "claim with the role (user, viewer or operator), or a list with one, e.g. realm_access.roles"
    flag("--oidc-role-claim", NAME, role, "", unset="all are users")
    flag = parser.group("limits", _DEFAULTS)
    flag("--max-requests", whole(1), "completions that may be open at a time", reloads=True)
    connections = "HTTP connections per client address; 0: no limit, for use behind a proxy that sets its own"
    flag("--max-connections-per-address", COUNT, connections, reloads=True)
    flag("--max-body-bytes", whole(1, metavar="BYTES"), "largest body of a completion")
    kept = "time for which responses of the Responses API are stored; 0: they are not"
    flag("--stored-responses-s", real(0, _MONTH_S, "SECONDS"), kept)
    stored = "what stored responses may take, in the broker's JetStream or else in memory; each tenant has a share"
    flag("--stored-responses-bytes", whole(0, metavar="BYTES"), stored)
    flag("--write-deadline-s", INTERVAL, "close the connection of a client that reads nothing for this long")
    flag("--grace-s", SECONDS, "time that open completions may take after SIGTERM", reloads=True)
    serve.add_flags(parser)
    parser.set_defaults(run=run)


class SettingsFactory:
    """Makes one gateway's settings at its start and at each reload.

    A reload may change API keys but not remove the last one, which would open the gateway to everyone."""

    def __init__(self) -> None:
        self._had_keys = False

    def __call__(self, options: argparse.Namespace) -> GatewaySettings:
        """Raises ValueError for invalid settings."""
        settings = settings_of(options)
        if self._had_keys and settings.allows_anonymous:
            raise ValueError(
                "api-key: removing the last key would let everyone in; restart the gateway if you want that"
            )
        self._had_keys = not settings.allows_anonymous
        return settings


def settings_of(options: argparse.Namespace) -> GatewaySettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    if options.oidc_issuer:
        extras.require("oidc", "--oidc-issuer")
    claims = (options.oidc_tenant_claim, options.oidc_role_claim)
    return GatewaySettings(
        oidc=OidcSettings(options.oidc_issuer, options.oidc_audience, *claims),
        broker=connection_flags.settings_of(options),
        key_settings=key_flags.settings_of(options),
        audit_settings=audit_flags.settings_of(options),
        api_keys=keys.ApiKeys(config.api_keys() + options.api_key, anonymous_tenant=options.tenant),
        aliases=Aliases(options.alias, options.default_model),
        allowed_origins=tuple(options.allowed_origin),
        status_page=serve.status_settings(options),
        **fields_of(GatewaySettings, options),
    )


def run(options: argparse.Namespace) -> int:
    from tokenbus.gateway import serve as gateway  # every server parses these flags; only a gateway needs this

    return serve.run("gateway", options, SettingsFactory(), gateway.serve)
