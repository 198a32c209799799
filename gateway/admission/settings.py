"""The settings of a gateway."""

import dataclasses
import urllib.parse

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_source import KeySettings
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import status
from tokenbus.protocol.wire import subjects


@dataclasses.dataclass(frozen=True)
class OidcSettings:
    """Whose tokens are taken beside keys, and which of their claims say who sends them."""

    issuer: str = ""
    """URL of the OpenID Connect issuer whose tokens are taken as keys; if empty, none are."""
    audience: str = ""
    """The audience that a token must have: the name of this service at the issuer."""
    tenant_claim: str = ""
    """The claim that names the tenant, such as `tenant` or `resource.tenant`; if empty, all are of --tenant."""
    role_claim: str = ""
    """The claim with the role, or a list with one: `user`, `viewer` or `operator`; if empty, all are users."""

    def __post_init__(self) -> None:
        """Raises ValueError for an issuer that can't be trusted, and for one without an audience."""
        if self.issuer:
            check_issuer_url(self.issuer)
        if self.issuer and not self.audience:
            raise ValueError("--oidc-issuer needs --oidc-audience: its tokens for other services are not for this one")


def check_issuer_url(url: str) -> None:
    """Raises ValueError for a URL whose content anyone on the network may have made."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and (parts.scheme != "http" or parts.hostname not in ("localhost", "127.0.0.1", "::1")):
        raise ValueError(f"--oidc-issuer must be an https URL, also for its keys, got {url[:200]!r}")


@dataclasses.dataclass(frozen=True)
class GatewaySettings:
    """All settings of one gateway."""

    broker: nats.BusSettings = dataclasses.field(default_factory=nats.BusSettings)
    prefix: str = subjects.DEFAULT_PREFIX
    host: str = "127.0.0.1"
    port: int = 8000
    """0 means any free port."""
    fd: int | None = None
    """File descriptor of an inherited listening socket, instead of host and port."""
    tenant: str = subjects.DEFAULT_TENANT
    """The tenant for which models are listed, and for which all requests are made if there are no keys."""
    tenant_inbox: str = ""
    """Prefix of a tenant's reply subjects, with `{tenant}` for its name; if empty, the connection's own prefix is
    used."""
    api_keys: ApiKeys = dataclasses.field(default_factory=lambda: ApiKeys(()))
    """Keys that this gateway alone knows, which have a tenant and nothing else."""
    key_settings: KeySettings = dataclasses.field(default_factory=KeySettings)
    """Where the keys of the whole fleet are."""
    audit_settings: AuditSettings = dataclasses.field(default_factory=AuditSettings)
    oidc: OidcSettings = dataclasses.field(default_factory=OidcSettings)
    revoke_ends_streams: bool = False
    """End the open streams of a key that is revoked, instead of letting them finish."""
    aliases: Aliases = dataclasses.field(default_factory=Aliases)
    """Other names for models, and the model for requests that name none."""
    console_operate: bool = False
    """Let operators command workers and change keys at the console, for which this gateway's NATS user needs the
    permissions."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the gateway (CORS), or `*` for all."""
    max_requests: int = 1_024
    """Requests that may be open at a time; further ones are refused with 503."""
    max_connections_per_address: int = 512
    """HTTP connections of one client address; 0 means no limit, for use behind a proxy that limits its clients."""
    max_body_bytes: int = 8 * 1024 * 1024
    """The largest body. 32 of this size may be open at a time, besides any number of up to a mebibyte each."""
    stored_responses_s: float = 24 * 3600.0
    """Seconds for which responses are stored for their clients; 0: nothing is stored."""
    stored_responses_bytes: int = 256 * 1024 * 1024
    """The most bytes of stored responses, in the broker's JetStream or else in this process's memory. Each tenant has
    an equal share, in which its oldest make room. 0: nothing is stored."""
    write_deadline_s: float = 30.0
    """A connection is closed if nothing, or less than 16 KiB, could be written to it for this many seconds."""
    status_page: status.StatusSettings = dataclasses.field(default_factory=status.StatusSettings)
    otlp_traces_endpoint: str = ""
    """URL to which spans are sent; if empty, none are recorded."""
    grace_s: float = 30.0
    """Seconds that open requests have to finish after SIGTERM."""

    @property
    def allows_anonymous(self) -> bool:
        """Whether requests need no key."""
        return self.api_keys.allows_anonymous and not self.key_settings.are_used and not self.oidc.issuer
