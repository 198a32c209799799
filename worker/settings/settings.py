"""Settings of a worker process: its models, and what all of its replicas share."""

import dataclasses
from collections.abc import Callable

from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import logs, long_waits, status
from tokenbus.protocol.wire import internal, messages, subjects
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.settings.adapter_settings import AdapterSettings

OnProgress = Callable[[internal.ControlReply], None]
"""Replies to a control message; may be called several times."""


@dataclasses.dataclass(frozen=True)
class FrontendSettings:
    """Settings of one frontend."""

    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """The allowed prefixes of a client's reply subject."""
    max_prompt_tokens: int = 0
    """The most tokens of a prompt; 0: what the context allows. Streams that other workers began continue in any
    case."""
    max_new_tokens: int = 1_024
    """The longest completion of a request without `max_tokens`, in tokens."""
    reasoning_budget_message: str = ""
    """A text written at the end of reasoning that is closed because its budget is spent; may be empty."""
    role: messages.WorkerRole = messages.WorkerRole.BOTH
    """The work it does: `prefill` computes prompts for others, `decode` leaves long ones to those, `both` does all."""
    site: str = ""
    """The name of the place where it runs; routers of the same place prefer it."""
    gone_after_s: float = 2.0
    """A stream whose client has no subscription is held for this long before it is cancelled."""
    link_patience_s: float = 60.0
    """The same while a link between brokers may be down."""
    slow_wait_s: float = long_waits.FIRST_S
    """A stream that waits this long for its first token is logged, and again each time the wait doubles."""
    debug: bool = False
    """Check every stream against the engine contract."""


@dataclasses.dataclass(frozen=True)
class ModelToServe:
    """A model that is served from the start."""

    served_name: str
    """Its name on the wire."""
    engine: EngineSettings
    replicas: int = 1
    adapters: tuple[AdapterSettings, ...] = ()
    """LoRA adapters loaded from the start."""
    on_demand: bool = False
    """Whether it is loaded only when requested, and unloaded to make room for others."""
    adapter_folder: str = ""
    """A folder whose adapters are loaded as they appear, as `PATH[@TENANT,...]`; none if empty."""


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """All settings of one worker process."""

    models: tuple[ModelToServe, ...]
    broker: nats.BusSettings = dataclasses.field(default_factory=nats.BusSettings)
    prefix: str = subjects.DEFAULT_PREFIX
    worker_id: str = ""
    """Name of the only replica, or the prefix of the names of several. By default made from host name and process
    id."""
    frontend: FrontendSettings = dataclasses.field(default_factory=FrontendSettings)
    status_page: status.StatusSettings = dataclasses.field(default_factory=status.StatusSettings)
    log: logs.LogSettings = logs.DEFAULTS
    """Log settings of the engine process."""
    otlp_traces_endpoint: str = ""
    """Collector that spans are sent to; none if empty."""
    vllm_metrics: bool = False
    """Export metrics under vLLM's names too."""
    hub_cache: str = ""
    """The folder for models from the Hub; if empty, the Hub library's environment variables decide."""
    kv_budget_bytes: int = 0
    """KV memory that all replicas together may take; 0 leaves it to each replica's own settings."""
    memory_budget_bytes: int = 0
    """Memory that all models together may take if some are loaded on demand; 0 makes free memory the only limit."""
    idle_unload_s: float = 0.0
    """An on-demand model is unloaded after this long without a request; 0 unloads only to make room."""
    max_waiting: int = 64
    """Accepted requests that may wait for a replica's lane; further ones are refused with `overloaded`."""
    audit_settings: AuditSettings = dataclasses.field(default_factory=AuditSettings)
    grace_s: float = 30.0
    """Running streams may finish this long after SIGTERM; then routers take them to other workers."""
    handover_s: float = 15.0
    """Time that routers have to take the remaining streams; any left after that end with an error."""
    step_timeout_s: float = 30.0
    """An engine whose step takes longer than this, and ten times longer than any before, is killed and restarted."""
