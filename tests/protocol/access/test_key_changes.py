"""Changes of a key at the same time are settled: a revoked key is never made valid again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.protocol.access.test_keys import NOW, made
from tokenbus.protocol.access import key_changes, keys
from tokenbus.protocol.access.key_stores import KeyConflictError, LoadedKeys, StoredKey
from tokenbus.protocol.access.keys import KeyRecord


class SlowStore:
    """One key in memory, which others may change between each reading and writing."""

    def __init__(self, record: KeyRecord) -> None:
        self.record = record
        self.revision = 1
        self.meanwhile: list[Callable[[], Awaitable[None]]] = []

    async def create(self) -> None: ...

    async def load(self) -> LoadedKeys:
        return LoadedKeys({self.record.id: self.record}, {})

    async def get(self, key_id: str) -> StoredKey | None:
        found = StoredKey(self.record, str(self.revision)) if key_id == self.record.id else None
        if self.meanwhile:
            await self.meanwhile.pop()()
        await asyncio.sleep(0)
        return found

    async def add(self, record: KeyRecord) -> None: ...

    async def replace(self, record: KeyRecord, revision: str) -> None:
        if revision != str(self.revision):
            raise KeyConflictError("changed")
        self.record, self.revision = record, self.revision + 1


async def test_of_two_revocations_and_a_rotation_at_once_the_key_is_revoked_once() -> None:
    _, record = made()
    store = SlowStore(record)

    async def revoke(at: float) -> KeyRecord:
        return await key_changes.change(store, record.id, lambda one: key_changes.revoked(one, at))

    async def rotate() -> KeyRecord:
        new = keys.new_key(record.id)
        return await key_changes.change(store, record.id, lambda one: key_changes.rotated(one, new, 0.0, NOW))

    async def meanwhile() -> None:
        await revoke(NOW)

    store.meanwhile.append(meanwhile)
    with pytest.raises(ValueError, match=rf"^the key {record.id} has been revoked: create another one$"):
        await rotate()
    assert [(await revoke(at)).revoked_at for at in (NOW + 1, NOW + 2)] == [NOW, NOW], "the first one counts"
    assert store.record.hash == record.hash
    assert store.revision == 2, "nothing is written that changes nothing"


async def test_a_revocation_holds_if_a_rotation_was_faster() -> None:
    _, record = made()
    store = SlowStore(record)
    new = keys.new_key(record.id)

    async def rotate() -> None:
        await key_changes.change(store, record.id, lambda one: key_changes.rotated(one, new, 60.0, NOW))

    store.meanwhile.append(rotate)
    revoked = await key_changes.change(store, record.id, lambda one: key_changes.revoked(one, NOW))
    assert (revoked.hash, revoked.revoked_at) == (new.hash, NOW)
    assert store.record == revoked


async def test_of_two_changes_at_once_both_are_made_and_a_revoked_key_gets_none() -> None:
    _, record = made()
    store = SlowStore(record)

    def changed(one: KeyRecord, **fields: object) -> KeyRecord:
        return key_changes.changed(one, fields, {}, NOW)

    async def rename() -> None:
        await key_changes.change(store, record.id, lambda one: changed(one, name="other"))

    store.meanwhile.append(rename)
    limited = await key_changes.change(
        store, record.id, lambda one: key_changes.changed(one, {}, {"max_tokens": 7}, NOW)
    )
    assert (limited.name, limited.limits.max_tokens, limited.hash) == ("other", 7, record.hash)
    assert key_changes.differences(record, limited) == {"name": "other", "max_tokens": 7}
    with pytest.raises(ValueError, match="has been revoked"):
        changed(key_changes.revoked(record, NOW), expires_at=None)
    with pytest.raises(ValueError, match="would expire before it becomes valid"):
        changed(changed(record, not_before=NOW + 9), expires_at=NOW + 9)


async def test_a_rotation_keeps_one_old_secret_for_the_grace_and_an_expired_key_gets_none() -> None:
    first, record = made(expires_at=NOW + 100)
    second, third = keys.new_key(record.id), keys.new_key(record.id)
    once = key_changes.rotated(record, second, 50.0, NOW)
    assert [once.has_secret(key.text, NOW + 49) for key in (first, second)] == [True, True]
    assert not once.has_secret(first.text, NOW + 50)
    twice = key_changes.rotated(once, third, 50.0, NOW + 1)
    assert [twice.has_secret(key.text, NOW + 2) for key in (first, second, third)] == [False, True, True]
    with pytest.raises(ValueError, match="has expired"):
        key_changes.rotated(once, third, 0.0, NOW + 100)


async def test_a_key_that_changes_all_the_time_is_given_up_and_an_unknown_one_is_named() -> None:
    _, record = made()

    class Restless(SlowStore):
        async def replace(self, record: KeyRecord, revision: str) -> None:
            raise KeyConflictError("changed")

    with pytest.raises(KeyConflictError, match="all the time"):
        await key_changes.change(Restless(record), record.id, lambda one: key_changes.revoked(one, NOW))
    with pytest.raises(key_changes.UnknownKeyError, match="aaaaaaaaaa"):
        await key_changes.change(SlowStore(record), "aaaaaaaaaa", lambda one: one)
