"""Changes of keys that are stored already. Each is tried again if somebody else has changed the key meanwhile, so that
of a revocation and a rotation at the same time the revocation always holds."""

from collections.abc import Callable

import msgspec

from tokenbus.protocol.access.key_stores import KeyConflictError, KeyStore, KeyStoreError
from tokenbus.protocol.access.keys import KeyRecord, NewKey, OldSecret

_MAX_TRIES = 20


class UnknownKeyError(KeyStoreError):
    """The store has no key with this id."""


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
