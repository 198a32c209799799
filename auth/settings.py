"""Settings of `tokenbus auth`."""

import dataclasses
from pathlib import Path

from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_source import KeySettings
from tokenbus.protocol.bus.settings import BusSettings
from tokenbus.protocol.telemetry.status import StatusSettings
from tokenbus.protocol.wire import subjects


@dataclasses.dataclass(frozen=True)
class AuthSettings:
    """Settings of one instance."""

    broker: BusSettings = dataclasses.field(default_factory=BusSettings)
    """The connection that reads keys, and writes to the audit log."""
    system_broker: BusSettings = dataclasses.field(default_factory=BusSettings)
    """The connection to the system account, in which brokers ask."""
    key_settings: KeySettings = dataclasses.field(default_factory=KeySettings)
    audit_settings: AuditSettings = dataclasses.field(default_factory=AuditSettings)
    seeds: Path = Path("callout.seeds")
    """The file of `tokenbus auth-init`, with which clients' rights are signed; all instances have the same."""
    account: str = "$G"
    """The broker's account that clients are let into; `$G` is the one that needs no name."""
    prefix: str = subjects.DEFAULT_PREFIX
    status_page: StatusSettings = dataclasses.field(default_factory=StatusSettings)
