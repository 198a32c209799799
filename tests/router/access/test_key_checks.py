"""A key allows the models, lengths and priorities of its record, while it is valid, to its own tenant."""

import msgspec
import pytest

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord, Role
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.errors import Code
from tokenbus.router.access import key_checks
from tokenbus.router.access.key_checks import KeyChecks

KEY = keys.new_key()
RECORD = KeyRecord(id=KEY.id, hash=KEY.hash, tenant="acme")


def checks_of(*records: KeyRecord, heard_at: float = 0.0) -> KeyChecks:
    ring = KeyRing(stale_s=10.0)
    for record in records:
        ring.put(record)
    ring.heard(heard_at)
    return KeyChecks(ring)


def refusal(ask: object, *args: object, **fields: object) -> errors.Error:
    with pytest.raises(errors.RequestError) as refused:
        ask(*args, **fields)  # type: ignore[operator]
    return refused.value.error


def asked(**fields: object) -> messages.GenerateRequest:
    return messages.GenerateRequest(prompt="x", **fields)  # type: ignore[arg-type]


def test_a_valid_key_is_found_by_its_id() -> None:
    assert checks_of(RECORD).find("acme", KEY.id, 1.0, 0.0) == RECORD


@pytest.mark.parametrize(
    ("record", "tenant"),
    [
        (None, "acme"),
        (RECORD, "globex"),
        (msgspec.structs.replace(RECORD, revoked_at=0.5), "acme"),
        (msgspec.structs.replace(RECORD, expires_at=1.0), "acme"),
        (msgspec.structs.replace(RECORD, not_before=2.0), "acme"),
    ],
)
def test_an_unknown_key_and_one_that_is_not_valid_now_or_another_tenants_are_unauthorized(
    record: KeyRecord | None, tenant: str
) -> None:
    found = refusal(checks_of(*([record] if record else [])).find, tenant, KEY.id, 1.0, 0.0)
    assert (found.code, found.retryable) == (Code.UNAUTHORIZED, False)


def test_while_the_store_is_silent_known_keys_are_valid_for_a_time_and_unknown_ones_may_try_again() -> None:
    checks = checks_of(RECORD)
    assert checks.find("acme", KEY.id, 1.0, 9.0) == RECORD
    for key_id, clock in ((KEY.id, 11.0), ("aaaaaaaaaa", 6.0)):
        found = refusal(checks.find, "acme", key_id, 1.0, clock)
        assert (found.code, found.retryable, found.retry_after_ms) == (Code.KEYS_UNAVAILABLE, True, 1_000.0)


@pytest.mark.parametrize(
    ("patterns", "model", "adapters", "is_allowed"),
    [
        (("*",), "chat", (), True),
        (("chat",), "chat", (), True),
        (("chat-*",), "chat-7b", ("sql",), True),
        (("chat",), "chat-7b", (), False),
        (("chat:sql",), "chat", ("sql",), True),
        (("chat:sql",), "chat", (), False),
        (("chat:sql",), "chat", ("sql", "poems"), False),
        (("chat:*",), "chat", ("sql", "poems"), True),
        (("chat:sql",), "other", ("sql",), False),
    ],
)
def test_a_key_allows_the_models_of_its_patterns(
    patterns: tuple[str, ...], model: str, adapters: tuple[str, ...], is_allowed: bool
) -> None:
    record = msgspec.structs.replace(RECORD, models=patterns)
    if is_allowed:
        key_checks.check_model(record, model, adapters)
    else:
        found = refusal(key_checks.check_model, record, model, adapters)
        assert (found.code, found.param) == (Code.FORBIDDEN, "model")
        assert patterns[0] in found.message


def test_a_viewer_may_ask_nothing_of_a_model() -> None:
    record = msgspec.structs.replace(RECORD, role=Role.VIEWER)
    assert refusal(key_checks.check_model, record, "chat").code is Code.FORBIDDEN


def test_a_request_is_kept_within_the_largest_max_tokens_of_its_key() -> None:
    record = msgspec.structs.replace(RECORD, limits=KeyLimits(max_tokens=10))
    assert key_checks.bounded(record, asked()).max_tokens == 10
    assert key_checks.bounded(record, asked(max_tokens=10)).max_tokens == 10
    assert key_checks.bounded(record, asked(max_tokens=1)).max_tokens == 1
    found = refusal(key_checks.bounded, record, asked(max_tokens=11))
    assert (found.code, found.param) == (Code.INVALID_REQUEST, "max_tokens")
    assert "at most 10" in found.message
    assert key_checks.bounded(RECORD, asked()).max_tokens is None


def test_a_request_may_not_be_served_sooner_than_its_key_allows() -> None:
    key_checks.bounded(RECORD, asked(priority=0))
    key_checks.bounded(RECORD, asked(priority=5))
    found = refusal(key_checks.bounded, RECORD, asked(priority=-1))
    assert (found.code, found.param) == (Code.FORBIDDEN, "priority")
    key_checks.bounded(msgspec.structs.replace(RECORD, max_priority=-5), asked(priority=-5))
