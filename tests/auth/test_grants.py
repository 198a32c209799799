"""A key's rights are the subjects that a client with this key uses, and its user's name changes with them."""

import msgspec
import pytest

from tokenbus.auth import grants
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord, OldSecret, Role
from tokenbus.protocol.wire import subjects
from tokenbus.protocol.wire.subjects import DEFAULT_PREFIX, Subjects

MADE = keys.new_key()
RECORD = KeyRecord(id=MADE.id, hash=MADE.hash, tenant="acme")


def changed(**fields: object) -> KeyRecord:
    record: KeyRecord = msgspec.structs.replace(RECORD, **fields)
    return record


def grant(record: KeyRecord, prefix: str = DEFAULT_PREFIX) -> grants.Grant:
    return grants.grant_of(record, record.hash, prefix)


def allows(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern matches a subject."""
    of, given = pattern.split("."), subject.split(".")
    if of[-1] == ">":
        return len(given) >= len(of) and all(a in ("*", b) for a, b in zip(of[:-1], given, strict=False))
    return len(of) == len(given) and all(a in ("*", b) for a, b in zip(of, given, strict=True))


def may_publish(record: KeyRecord, subject: str) -> bool:
    return any(allows(pattern, subject) for pattern in grant(record).publish)


@pytest.mark.parametrize("tenant", ["acme", "a.b c", "default"])
def test_a_key_may_cancel_resync_and_send_parts_as_the_client_library_does(tenant: str) -> None:
    built, record = Subjects(), changed(tenant=tenant)
    for subject in (
        built.cancel("r", tenant),
        built.cancel("r", tenant, "demo"),
        built.resync("r", tenant),
        built.resync("r", tenant, "demo"),
        built.upload("router", subjects.encode_name(tenant), "u"),
    ):
        assert may_publish(record, subject), subject
    assert not may_publish(record, built.cancel("r", "other"))
    assert not may_publish(record, built.cancel("r", "other", "demo"))


@pytest.mark.parametrize(
    ("models", "tokens"),
    [
        (("*",), ["*"]),
        (("qwen*", "demo"), ["*"]),
        (("a?",), ["*"]),
        (("[ab]",), ["*"]),
        (("qwen2.5", "demo", "demo"), ["demo", "qwen2=2E5"]),
        (("a>b",), ["a=3Eb"]),
        (("a.>",), ["a=2E=3E"]),
    ],
)
def test_models_become_subject_tokens_and_patterns_all_models(models: tuple[str, ...], tokens: list[str]) -> None:
    own = [one for one in grant(changed(models=models)).publish if ".generate." in one]
    assert own == [f"{DEFAULT_PREFIX}.generate.{token}.acme.{MADE.id}" for token in tokens]


def test_nothing_outside_the_systems_subjects_and_the_keys_inbox_is_granted() -> None:
    for role in Role:
        found = grant(changed(role=role, tenant="a.>"), "x.y")
        assert found.publish
        assert all(subject.startswith("x.y.") for subject in found.publish)
        assert found.subscribe[0] == f"_INBOX_key.a=2E=3E.{MADE.id}.>"
        assert found.subscribe[1:] == (("x.y.card.>",) if role is Role.OPERATOR else ())


def test_a_user_has_another_name_whenever_its_rights_or_its_end_change_and_only_then() -> None:
    named = grant(RECORD).user
    assert grants.key_id_of(named) == MADE.id
    others = [
        changed(hash=keys.new_key(MADE.id).hash),
        changed(tenant="globex"),
        changed(models=("demo",)),
        changed(role=Role.VIEWER),
        changed(expires_at=9e9),
        changed(revoked_at=7e9),
        changed(expires_at=8e9, revoked_at=9e9),
    ]
    assert len({grant(record).user for record in (RECORD, *others)}) == len(others) + 1
    same = changed(name="other", limits=KeyLimits(concurrency=1), max_priority=3, created_by="x")
    assert grant(same).user == named


@pytest.mark.parametrize("user", ["router", "auth-system", "aaaaaaaaaa", "aaaaaaaaaa-", f"aaaaaaaaaa-{'g' * 12}", ""])
def test_users_of_processes_belong_to_no_key(user: str) -> None:
    assert grants.key_id_of(user) is None


def test_a_key_has_the_users_of_its_valid_secrets() -> None:
    old = keys.new_key(MADE.id)
    record = changed(old_secret=OldSecret(old.hash, 100.0), expires_at=200.0, not_before=10.0)
    by_new, by_old = (grants.grant_of(record, digest, DEFAULT_PREFIX) for digest in (MADE.hash, old.hash))
    assert (by_new.valid_until, by_old.valid_until) == (200.0, 100.0)
    expected = {9.0: set(), 10.0: {by_new.user, by_old.user}, 100.0: {by_new.user}, 200.0: set()}
    for now, users in expected.items():
        assert grants.users_of(record, DEFAULT_PREFIX, now) == users
    assert grants.users_of(None, DEFAULT_PREFIX, 10.0) == set()
    assert grants.all_users_of(record, DEFAULT_PREFIX) == {by_new.user, by_old.user}
