"""All settings of a router."""

import dataclasses
from collections.abc import Mapping

from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_source import KeySettings
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.telemetry import status
from tokenbus.protocol.wire import limits, subjects
from tokenbus.router.access.limits import TenantLimits
from tokenbus.router.placement.policies import make_policies
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS
from tokenbus.router.requests.flights.request_telemetry import RequestLogSettings
from tokenbus.router.requests.queueing.placement_queue import QueueSettings


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """Settings of one router. Its limits are its own, except those of tenants, which routers enforce together."""

    broker: nats.BusSettings = dataclasses.field(default_factory=nats.BusSettings)
    prefix: str = subjects.DEFAULT_PREFIX
    router_id: str = ""
    """Name of this router in logs; made from host name and process id if empty."""
    policy: str = "kv"
    """Policy for requests that name none."""
    temperature: float = 0.0
    """At 0 the cheapest worker is always chosen. The higher it is, the more often costlier ones are."""
    min_remote_prefill_tokens: int = MIN_REMOTE_PREFILL_TOKENS
    """Fewest missing tokens for which a worker of the role `prefill` may compute a prompt; 0: none ever does."""
    model_patterns: tuple[str, ...] = ()
    """Patterns of the names of the models that it serves; all if empty."""
    site: str = ""
    """The name of the place where it runs; if empty, all workers count as near."""
    site_cost_s: float = 0.25
    """Seconds by which a worker of another site counts as slower: it gets a request if those here take longer."""
    queue: QueueSettings = dataclasses.field(default_factory=QueueSettings)
    """Limits of the requests that wait while every worker is busy."""
    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """Prefixes that a client's reply subject may have."""
    max_request_bytes: int = 16 * 1024 * 1024
    """Largest request. One that does not fit in a broker message comes in parts."""
    tenant_upload_bytes: int = 64 * 1024 * 1024
    """Total size of one tenant's requests that are arriving in parts."""
    max_upload_bytes: int = 256 * 1024 * 1024
    """Memory for the parts of all incomplete requests."""
    max_flights: int = 16_384
    """Open requests; further ones are refused with `overloaded`."""
    max_prompt_bytes: int = 256 * 1024 * 1024
    """Memory for the prompts and completions of open requests. If those that no worker has accepted take more, further
    requests are refused with `overloaded`; if all together take more, the largest can't survive their worker."""
    tokenization_cache_bytes: int = 64 * 1024 * 1024
    """Memory for token ids of texts in conversations; 0 tokenizes every turn from the start."""
    hold_s: float = 0.0
    """Time that a request waits for a worker if its model has none, as after scaling to zero; 0 refuses it."""
    expected_models: tuple[str, ...] = ()
    """Models whose requests are held even if no worker has served them since this router started."""
    patience_s: float = 60.0
    """Time that a request which has lost its worker waits for another to continue it."""
    tenant_limits: TenantLimits = dataclasses.field(default_factory=TenantLimits)
    """Limits of each tenant that has no override."""
    tenant_limit_overrides: Mapping[str, TenantLimits] = dataclasses.field(default_factory=dict)
    """Limits of single tenants, by name."""
    key_settings: KeySettings = dataclasses.field(default_factory=KeySettings)
    usage: bool = False
    """Whether it counts what requests use, in a bucket of the broker's JetStream."""
    usage_days: int = 400
    """Days for which these counts are kept."""
    audit_settings: AuditSettings = dataclasses.field(default_factory=AuditSettings)
    status_page: status.StatusSettings = dataclasses.field(default_factory=status.StatusSettings)
    request_log: RequestLogSettings = dataclasses.field(default_factory=RequestLogSettings)
    otlp_traces_endpoint: str = ""
    """Collector to which spans are sent; empty to send none."""
    grace_s: float = 5.0
    """Time that requests get to reach a worker when the router stops."""

    @property
    def uploads(self) -> UploadLimits:
        """Limits of requests that arrive in parts."""
        return UploadLimits(self.max_request_bytes, self.tenant_upload_bytes, self.max_upload_bytes)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown policy, and for a pattern that no name matches."""
        if any(not pattern or len(pattern.encode()) > limits.MAX_NAME_BYTES for pattern in self.model_patterns):
            raise ValueError(f"--models must have 1 to {limits.MAX_NAME_BYTES} bytes")
        if self.policy not in (known := make_policies()):
            raise ValueError(f"--policy must be one of {', '.join(known)}, got {self.policy!r}")
