"""Changes of keys. One of a stored key is tried again if somebody else has changed the key meanwhile, so that
of a revocation and a rotation at the same time the revocation always holds."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tokenbus.protocol.access.key_ring import MAX_KEYS
from tokenbus.protocol.access.key_stores import KeyConflictError, KeyStore, KeyStoreError
from tokenbus.protocol.access.keys import KeyRecord, NewKey, OldSecret

_MAX_TRIES = 20


class UnknownKeyError(KeyStoreError):
    """The store has no key with this id."""


async def add(store: KeyStore, record: KeyRecord) -> None:
    """Adds a key to a store, which is made if it is not there. Raises KeyStoreError, also for one key too many."""
    await store.create()
    if len((await store.load()).records) >= MAX_KEYS:
        raise KeyStoreError(f"there are {MAX_KEYS} keys, and there can't be more")
    await store.add(record)


async def change(store: KeyStore, key_id: str, edit: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
    """Replaces a record by what `edit` makes of it, which is called again after a conflict; returns the new record.

    Raises UnknownKeyError, KeyStoreError, and what `edit` does."""
    for _ in range(_MAX_TRIES):
        found = await store.get(key_id)
        if found is None:
            raise UnknownKeyError(f"there is no key {key_id}")
        edited = edit(found.record)
        if edited == found.record:
            return edited
        try:
            await store.replace(edited, found.revision)
        except KeyConflictError:
            continue
        return edited
    raise KeyConflictError(f"the key {key_id} is changed all the time: try again")


def changed(record: KeyRecord, fields: Mapping[str, Any], limits: Mapping[str, int], now: float) -> KeyRecord:
    """Returns the record with these fields and limits replaced; those that are not named stay.

    Raises ValueError if the key is revoked, or would end before it begins."""
    if record.revoked_at is not None:
        raise ValueError(f"the key {record.id} {record.problem_at(now)}: create another one")
    edited = msgspec.structs.replace(record, **fields, limits=msgspec.structs.replace(record.limits, **limits))
    if edited.expires_at is not None and edited.expires_at <= edited.not_before:
        raise ValueError(f"the key {record.id} would expire before it becomes valid")
    return edited


def differences(before: KeyRecord, after: KeyRecord) -> dict[str, Any]:
    """Returns the fields and limits that differ, by name, as they are afterwards."""
    return {
        name: getattr(later, name)
        for earlier, later in ((before, after), (before.limits, after.limits))
        for name in later.__struct_fields__
        if name != "limits" and getattr(earlier, name) != getattr(later, name)
    }


def revoked(record: KeyRecord, now: float) -> KeyRecord:
    """Returns a record of the key that is not valid any more; one that is revoked already stays as it is."""
    return record if record.revoked_at is not None else msgspec.structs.replace(record, revoked_at=now)


def rotated(record: KeyRecord, new: NewKey, grace_s: float, now: float) -> KeyRecord:
    """Returns the record with a new secret; the one before stays valid for `grace_s`, and earlier ones don't.

    Raises ValueError if the key is revoked or has expired: a new secret would not make it valid."""
    if record.revoked_at is not None or (record.expires_at is not None and now >= record.expires_at):
        raise ValueError(f"the key {record.id} {record.problem_at(now)}: create another one")
    old = OldSecret(record.hash, now + grace_s) if grace_s else None
    return msgspec.structs.replace(record, hash=new.hash, old_secret=old)
