"""The parts that one instance of `tokenbus auth` has once, and most of its objects use."""

import time
from collections.abc import Callable
from typing import NamedTuple

from tokenbus.auth.brokers import Brokers
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_ring import KeyRing


class Instance(NamedTuple):
    """One instance, of which several may run."""

    brokers: Brokers
    ring: KeyRing
    """The keys, which something else keeps up to date."""
    prefix: str
    """The prefix of all subjects."""
    metrics: CalloutMetrics
    audit: AuditWriter | None = None
    now: Callable[[], float] = time.time
    """Returns Unix time."""
    clock: Callable[[], float] = time.monotonic
