"""What can be set of a gateway."""

import dataclasses

from tokenbus.gateway.keys import ApiKeys
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import status
from tokenbus.protocol.wire import subjects


@dataclasses.dataclass(frozen=True)
class GatewaySettings:
    """All settings of one gateway."""

    broker: nats.Settings = dataclasses.field(default_factory=nats.Settings)
    prefix: str = subjects.DEFAULT_PREFIX
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    fd: int | None = None
    """A listening socket that the process was started with, instead of host and port."""
    tenant: str = subjects.DEFAULT_TENANT
    """On whose behalf it asks for models, and for everything where there are no keys."""
    tenant_inbox: str = ""
    """What the reply subjects of a tenant begin with, with `{tenant}` for its name; as the connection's where empty."""
    keys: ApiKeys = dataclasses.field(default_factory=lambda: ApiKeys(()))
    max_requests: int = 1_024
    """Completions that are open at a time; beyond that they are refused with 503."""
    max_connections_per_address: int = 512
    """HTTP connections of one client address; 0 is no bound, for where a proxy bounds its own clients."""
    status_page: status.Settings = dataclasses.field(default_factory=status.Settings)
    """Where it shows its metrics."""
    otlp_traces_endpoint: str = ""
    """Where spans of requests are sent; nowhere where empty."""
    grace_s: float = 30.0
    """For running completions after SIGTERM."""
