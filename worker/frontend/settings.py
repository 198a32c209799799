"""Settings of a worker process: the models that it serves, and what all of its replicas have in common."""

import dataclasses
from collections.abc import Callable

from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.telemetry import backoff, logs, status
from tokenbus.protocol.wire import internal, subjects
from tokenbus.worker.engine.process.settings import EngineSettings

OnProgress = Callable[[internal.ControlReply], None]
"""Answers a control message; may be called several times."""


@dataclasses.dataclass(frozen=True)
class FrontendSettings:
    """What a frontend needs to know beside its model and its name."""

    inbox_prefixes: tuple[str, ...] = subjects.DEFAULT_INBOX_PREFIXES
    """What a client's reply subject may begin with."""
    max_new_tokens: int = 1_024
    """Length of a completion that was asked for without `max_tokens`."""
    slow_wait_s: float = backoff.FIRST_S
    """A stream that has waited so long for its first token leaves a line in the log, and another each time that has
    doubled."""
    debug: bool = False
    """Hold every stream against the engine contract."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model, and how many replicas of it there are from the start."""

    served_name: str
    """Its name on the wire."""
    engine: EngineSettings
    replicas: int = 1


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """All settings of one worker process."""

    models: tuple[ServedModel, ...]
    broker: nats.Settings = dataclasses.field(default_factory=nats.Settings)
    prefix: str = subjects.DEFAULT_PREFIX
    worker_id: str = ""
    """Stable name of the only replica, or what the names of several begin with; made up from host name and process id
    where absent."""
    frontend: FrontendSettings = dataclasses.field(default_factory=FrontendSettings)
    status_page: status.Settings = dataclasses.field(default_factory=status.Settings)
    log: logs.Settings = logs.DEFAULTS
    """How its engine process logs."""
    otlp_traces_endpoint: str = ""
    """Where spans of requests are sent; nowhere where empty."""
    vllm_metrics: bool = False
    """Show them under vLLM's names as well."""
    kv_budget_bytes: int = 0
    """What all replicas together may take for KV memory; 0: as much as each one's own settings say."""
    max_waiting: int = 64
    """Accepted requests that may wait for a lane of a replica; beyond it requests are refused with `overloaded`."""
    grace_s: float = 30.0
    """How long running streams may go on after SIGTERM."""
    step_timeout_s: float = 30.0
    """An engine whose step takes longer, and ten times as long as any before, is ended as a crash."""
