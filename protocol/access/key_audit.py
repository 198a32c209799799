"""Writes changes of keys to the audit log, for those who make them."""

import secrets
import time
from typing import Any

from tokenbus.protocol.access import audit
from tokenbus.protocol.access.audit_log import AuditLog, AuditSettings
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bucket import BucketMissingError
from tokenbus.protocol.bus.connection import Connection


class KeyAudit:
    """The audit log, as one who changes keys writes to it."""

    def __init__(self, connection: Connection, prefix: str, settings: AuditSettings, actor: str) -> None:
        """`prefix` is that of all subjects, `actor` the one who makes the changes."""
        self._audit = AuditLog(connection, prefix)
        self._settings = settings
        self._actor = actor

    def __repr__(self) -> str:
        return f"<KeyAudit of {self._actor}>"

    async def add(self, what: str, key: KeyRecord, **fields: Any) -> None:
        """Adds a change that was made. Raises BucketError."""
        one = audit.record(time.time(), "key", what, key.tenant, self._actor, key_id=key.id, **fields)
        record_id = secrets.token_hex(8)
        try:
            await self._audit.add(one, record_id)
        except BucketMissingError:
            await self._audit.create(self._settings)
            await self._audit.add(one, record_id)


def facts_of(key: KeyRecord) -> dict[str, Any]:
    """Returns what the log says of a new key."""
    numbers: dict[str, Any] = {name: getattr(key.limits, name) or None for name in key.limits.__struct_fields__}
    numbers |= {"max_priority": key.max_priority or None, "expires_at": key.expires_at}
    return {"name": key.name, "role": str(key.role), "models": key.models} | numbers
