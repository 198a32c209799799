"""Keys, their records, and the ring that says which of them may be used."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import SILENT_AFTER_S, KeyProblem, KeyRefusedError, KeyRing
from tokenbus.protocol.access.keys import KeyRecord, NewKey, OldSecret

NOW = 1_800_000_000.0


def made(tenant: str = "acme", **fields: object) -> tuple[NewKey, KeyRecord]:
    key = keys.new_key()
    return key, msgspec.convert({"id": key.id, "hash": key.hash, "tenant": tenant, **fields}, KeyRecord)


def ring_of(*records: KeyRecord, heard_at: float = 0.0) -> KeyRing:
    ring = KeyRing()
    for record in records:
        ring.put(record)
    ring.heard(heard_at)
    return ring


def problem_of(ring: KeyRing, key: str, now: float = NOW, clock: float = 0.0) -> KeyProblem | None:
    try:
        ring.find(key, now, clock)
    except KeyRefusedError as error:
        assert key not in str(error), "no secret is shown"
        return error.problem
    return None


def test_a_key_has_its_id_in_it_and_256_random_bits_and_is_never_made_twice() -> None:
    made_keys = [keys.new_key() for _ in range(100)]
    assert all(keys.id_of(key.text) == key.id and keys.is_key_id(key.id) for key in made_keys)
    assert len({key.text for key in made_keys}) == len({key.id for key in made_keys}) == 100
    again = keys.new_key(made_keys[0].id)
    assert again.id == made_keys[0].id
    assert again.text != made_keys[0].text


def test_a_key_is_found_by_its_whole_text_only() -> None:
    (key, record), (other, other_record) = made(), made()
    ring = ring_of(record, other_record)
    assert ring.find(key.text, NOW, 0.0) is record
    secret = other.text.removeprefix(f"tb_{other.id}_")
    for wrong in (f"tb_{key.id}_{secret}", key.text[:-1], f"{key.text}x", key.id, "tb_", key.text.upper()):
        assert problem_of(ring, wrong) is KeyProblem.INVALID


def test_a_key_is_valid_from_one_moment_until_another_or_its_revocation() -> None:
    key, record = made(not_before=NOW, expires_at=NOW + 10)
    times = {NOW - 1: KeyProblem.NOT_VALID_NOW, NOW: None, NOW + 9.9: None, NOW + 10: KeyProblem.NOT_VALID_NOW}
    assert {now: problem_of(ring_of(record), key.text, now) for now in times} == times
    revoked = msgspec.structs.replace(record, revoked_at=NOW + 5)
    for now in (NOW + 4, NOW + 5):  # the clock of who has revoked it may be ahead
        assert problem_of(ring_of(revoked), key.text, now) is KeyProblem.NOT_VALID_NOW


def test_after_a_rotation_the_old_secret_is_valid_as_long_as_was_said() -> None:
    key, record = made()
    new = keys.new_key(key.id)
    rotated = msgspec.structs.replace(record, hash=new.hash, old_secret=OldSecret(key.hash, NOW + 10))
    ring = ring_of(rotated)
    assert problem_of(ring, new.text) is None
    assert problem_of(ring, key.text, NOW + 9) is None
    assert problem_of(ring, key.text, NOW + 10) is KeyProblem.INVALID


def test_while_the_store_is_silent_known_keys_last_for_a_set_time_and_no_key_is_called_invalid() -> None:
    (key, record), (unknown, _) = made(), made()
    ring = ring_of(record)
    ring.stale_s = 60.0
    assert problem_of(ring, unknown.text, clock=SILENT_AFTER_S) is KeyProblem.INVALID
    assert problem_of(ring, unknown.text, clock=SILENT_AFTER_S + 1) is KeyProblem.UNAVAILABLE
    assert problem_of(ring, "not a key", clock=SILENT_AFTER_S + 1) is KeyProblem.INVALID
    assert problem_of(ring, key.text, clock=60.0) is None
    assert problem_of(ring, key.text, clock=61.0) is KeyProblem.UNAVAILABLE
    ring.stale_s = 0.0
    assert problem_of(ring, key.text, clock=SILENT_AFTER_S) is None
    assert problem_of(ring, key.text, clock=SILENT_AFTER_S + 1) is KeyProblem.UNAVAILABLE, "it fails closed"
    assert problem_of(KeyRing(), key.text) is KeyProblem.UNAVAILABLE, "nothing was ever told"


def test_a_ring_tells_of_each_change_once() -> None:
    _, record = made()
    revoked = msgspec.structs.replace(record, revoked_at=NOW)
    ring, told = ring_of(), []
    ring.on_change.append(lambda before, after: told.append((before, after)))
    ring.put(record)
    ring.put(msgspec.structs.replace(record))
    ring.put(revoked)
    ring.remove(record.id)
    ring.remove(record.id)
    assert told == [(None, record), (record, revoked), (revoked, None)]


def test_patterns_say_which_models_a_key_may_use() -> None:
    _, record = made(models=["chat", "qwen*"])
    assert [record.allows_model(one) for one in ("chat", "chat2", "qwen2.5", "Chat")] == [True, False, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "short"),
        ("hash", "abc"),
        ("tenant", ""),
        ("models", []),
        ("models", [""]),
        ("role", "root"),
        ("limits", {"tokens_per_minute": -1}),
        ("limits", {"tokens_per_minute": 2**63}),
        ("limits", {"tokens": 1}),
        ("expires_at", -1),
        ("max_priority", 10_000),
        ("v", 0),
    ],
)
def test_a_record_with_a_value_that_is_not_allowed_is_refused_by_name(field: str, value: object) -> None:
    _, record = made()
    content = msgspec.to_builtins(record) | {field: value}
    with pytest.raises(ValueError) as refused:
        keys.decode_record(msgspec.json.encode(content))
    assert field in str(refused.value)
    assert record.hash not in str(refused.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused(payload: bytes) -> None:
    try:
        keys.decode_record(payload)
    except ValueError:
        return


def test_fields_of_later_versions_are_ignored() -> None:
    _, record = made()
    content = msgspec.to_builtins(record) | {"v": 2, "region": "eu"}
    assert keys.decode_record(msgspec.json.encode(content)) == msgspec.structs.replace(record, v=2)
