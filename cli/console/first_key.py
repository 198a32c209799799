"""The first key of a fleet, with which all others are made."""

import time

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_stores import KeyStore
from tokenbus.protocol.access.keys import KeyRecord, Role
from tokenbus.protocol.wire import subjects

_NAME = "first operator"


async def make(store: KeyStore, created_by: str) -> tuple[str, KeyRecord] | None:
    """Returns a new key for an operator, and its record, or None if the store has a valid one. Raises KeyStoreError."""
    now = time.time()
    known = (await store.load()).records.values()
    if any(one.role is Role.OPERATOR and one.is_valid_at(now) for one in known):
        return None
    new = keys.new_key()
    record = KeyRecord(
        id=new.id,
        hash=new.hash,
        tenant=subjects.DEFAULT_TENANT,
        name=_NAME,
        role=Role.OPERATOR,
        created_at=now,
        created_by=created_by,
    )
    await store.add(record)
    return new.text, record
