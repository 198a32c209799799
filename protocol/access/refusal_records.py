"""Writes who was refused to the audit log. Ids of keys are no secret, so that anyone could fill it with a record each:
of each key and reason there is at most one in ten seconds, with the number since the one before."""

from collections import Counter
from typing import Any

from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.keys import KeyRecord

_INTERVAL_S = 10.0
_MAX_TOLD_APART = 4_096
"""Keys and reasons that are told apart in time."""


class RefusalRecords:
    """The refusals of one process."""

    def __init__(self, audit: AuditWriter) -> None:
        self._audit = audit
        self._unrecorded: Counter[tuple[str, str]] = Counter()
        self._recorded_at: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<RefusalRecords of {len(self._recorded_at)}>"

    def add(self, claimed: KeyRecord, reason: str, clock: float, **fields: Any) -> None:
        """Counts a refusal of whoever claims to have a key, and records it if that is due. `clock` is monotonic."""
        if len(self._recorded_at) > _MAX_TOLD_APART:
            self._recorded_at.clear()
            self._unrecorded.clear()
        about = (reason, claimed.id)
        self._unrecorded[about] += 1
        if clock - self._recorded_at.get(about, -_INTERVAL_S) >= _INTERVAL_S:
            self._recorded_at[about] = clock
            count = self._unrecorded.pop(about)
            self._audit.add("connection", "refused", claimed.tenant, claimed.id, reason=reason, count=count, **fields)
