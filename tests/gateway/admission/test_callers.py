"""A gateway knows its callers by its own keys and by those of the fleet, and says why it refuses one."""

import contextlib
from typing import Any

import pytest

from tokenbus.gateway.admission.callers import Caller, Callers
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http.http_errors import INVALID_API_KEY, ApiError, ErrorResponse
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyRecord, OldSecret, Role

NOW = 1_800_000_000.0


def made(**fields: Any) -> tuple[str, KeyRecord]:
    """Returns a new key and its record."""
    new = keys.new_key()
    return new.text, KeyRecord(id=new.id, hash=new.hash, **{"tenant": "acme", **fields})


def ring_of(*records: KeyRecord) -> KeyRing:
    ring = KeyRing(stale_s=300.0)
    for record in records:
        ring.put(record)
    ring.heard(1_000.0)
    return ring


class Recorded(list[tuple[Any, ...]]):
    """What is added to the audit log."""

    def add(self, *record: str, **fields: object) -> None:
        self.append((*record, fields))


class Door:
    """The callers of a gateway, at a time that a test sets."""

    def __init__(self, *pairs: str, ring: KeyRing | None = None) -> None:
        self.now, self.clock = NOW, 1_000.0
        self.metrics = GatewayMetrics()
        self.audit = Recorded()
        audit: Any = self.audit
        self.callers = Callers(
            ApiKeys(pairs), ring, self.metrics, None, audit, now=lambda: self.now, clock=lambda: self.clock
        )

    async def caller(self, key: str) -> Caller:
        return await self.callers.identify({"authorization": f"Bearer {key}"})

    async def refusal(self, key: str | None) -> ErrorResponse:
        with pytest.raises(ApiError) as raised:
            await self.callers.identify({} if key is None else {"x-api-key": key})
        return raised.value.response

    def num_refused(self, reason: str) -> float:
        samples = next(iter(self.metrics.keys_refused.collect())).samples
        return next(one.value for one in samples if one.labels == {"reason": reason} and one.name.endswith("_total"))


async def test_without_keys_everyone_is_the_gateways_tenant() -> None:
    assert (await Door().caller("anything")) == Caller("default")


async def test_a_key_of_the_gateway_has_a_tenant_and_no_id() -> None:
    assert (await Door("one=acme", ring=ring_of()).caller("one")) == Caller("acme")


@pytest.mark.parametrize(
    ("host", "is_refused"),
    [
        ("evil.example", True),
        ("127.0.0.1.evil.example:8000", True),
        ("evil.example.:8000", True),
        ("localhost:8000", False),
        ("127.0.0.1:8000", False),
        ("[::1]:8000", False),
        ("[fd00::1]", False),
        ("llm:8000", False),
        ("gateway.default.svc.cluster.local", False),
        ("chat.example.org", False),
        ("Chat.Example.org:8443", False),
        ("chat.example.org.evil.example", True),
        ("", False),
    ],
)
@pytest.mark.parametrize("origin", [{}, {"origin": "http://{host}"}, {"origin": "http://other.example"}])
def test_without_keys_a_request_to_a_strangers_name_is_refused(
    host: str, origin: dict[str, str], *, is_refused: bool
) -> None:
    headers = {"host": host} | {name: value.format(host=host) for name, value in origin.items()}
    allowed = ("https://chat.example.org",)
    with pytest.raises(ApiError) if is_refused else contextlib.nullcontext():
        Door().callers.check_host(headers, allowed)
    Door("one=acme").callers.check_host(headers, allowed)
    Door().callers.check_host(headers, ("*",))
    Door().callers.check_host(headers | {"origin": "https://chat.example.org"}, allowed)


def test_on_a_network_programs_use_a_public_name_and_pages_under_it_do_not() -> None:
    callers, headers = Door().callers, {"host": "gpu.corp.example:8000"}
    callers.check_host(headers, (), is_on_network=True)
    callers.check_host(headers | {"origin": "http://localhost"}, (), is_on_network=True)
    with pytest.raises(ApiError):
        callers.check_host(headers | {"origin": "http://gpu.corp.example:8000"}, (), is_on_network=True)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_a_key_of_the_fleet_has_all_that_its_record_says(header: str) -> None:
    text, record = made(role=Role.OPERATOR, models=("chat-*",))
    door = Door("one=other", ring=ring_of(record))
    found = await door.callers.identify({header: f"Bearer {text}" if header == "authorization" else text})
    assert found == Caller("acme", record.id, Role.OPERATOR, ("chat-*",))


async def test_once_the_fleet_has_keys_none_are_let_in_without_one() -> None:
    door = Door(ring=ring_of())
    assert (await door.refusal(None)) == INVALID_API_KEY
    assert (await door.refusal("")) == INVALID_API_KEY
    assert (await door.refusal(f"tb_aaaaaaaaaa_{'x' * 43}")) == INVALID_API_KEY
    assert door.num_refused("invalid") == 3


async def test_a_secret_under_the_id_of_another_key_is_as_wrong_as_any() -> None:
    (first, one), (second, other) = made(), made(tenant="other")
    door = Door(ring=ring_of(one, other))
    forged = f"tb_{one.id}_{second[14:]}"
    assert len(forged) == len(first)
    assert (await door.refusal(forged)) == INVALID_API_KEY


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"revoked_at": NOW + 60}, "has been revoked"),
        ({"expires_at": NOW}, "has expired"),
        ({"not_before": NOW + 1}, "is not valid yet"),
    ],
)
async def test_a_key_that_is_not_valid_now_is_told_why(fields: dict[str, float], words: str) -> None:
    text, record = made(**fields)
    door = Door(ring=ring_of(record))
    refusal = await door.refusal(text)
    assert (refusal.status, refusal.code, refusal.retryable) == (401, "invalid_api_key", False)
    assert refusal.message == f"the API key {record.id} {words}"
    assert door.num_refused("not_valid_now") == 1


async def test_an_old_secret_is_a_key_until_its_grace_is_over() -> None:
    text, record = made()
    new = keys.new_key(record.id)
    rotated = KeyRecord(id=record.id, hash=new.hash, tenant="acme", old_secret=OldSecret(record.hash, NOW + 10))
    door = Door(ring=ring_of(rotated))
    assert (await door.caller(text)).key_id == (await door.caller(new.text)).key_id == record.id
    door.now += 10
    assert (await door.refusal(text)) == INVALID_API_KEY


async def test_while_the_store_is_silent_known_keys_are_let_in_for_a_while_and_others_are_told_to_wait() -> None:
    text, record = made()
    unknown, _ = made()
    door = Door("one=other", ring=ring_of(record))
    door.clock += 299
    assert (await door.caller(text)).tenant == "acme"
    refusal = await door.refusal(unknown)
    assert (refusal.status, refusal.code, refusal.retryable) == (503, "keys_unavailable", True)
    assert "retry-after" in refusal.headers
    door.clock += 2
    assert (await door.refusal(text)).code == "keys_unavailable"
    assert (await door.caller("one")).tenant == "other", "the gateway's own keys need no store"


def test_the_tenants_are_those_of_all_keys() -> None:
    _, one = made(tenant="a")
    _, other = made(tenant="b")
    assert Door(ring=ring_of(one, other)).callers.tenants == {"a", "b"}
    assert Door("key=c", ring=ring_of(one)).callers.tenants == {"a", "c"}
    assert Door(ring=ring_of()).callers.tenants == {"default"}
    assert Door().callers.tenants == {"default"}


async def test_refusals_of_known_keys_are_in_the_audit_log_a_few_of_each_and_of_no_others() -> None:
    (text, record), (looking, viewer) = made(), made(role=Role.VIEWER)
    door = Door(ring=ring_of(record, viewer))
    wrong = f"{text[:14]}{'A' * 43}"
    for key in (wrong, wrong, f"tb_aaaaaaaaaa_{'x' * 43}", None, "sk-x"):
        await door.refusal(key)
    with pytest.raises(ApiError):
        door.callers.check_requests(await door.caller(looking))
    door.clock += 10.0
    door.callers.ring.heard(door.clock)  # type: ignore[union-attr]
    await door.refusal(wrong)
    assert door.audit == [
        ("connection", "refused", "acme", record.id, {"reason": "invalid", "over": "http", "count": 1}),
        ("connection", "refused", "acme", viewer.id, {"reason": "forbidden", "over": "http", "count": 1}),
        ("connection", "refused", "acme", record.id, {"reason": "invalid", "over": "http", "count": 2}),
    ]
    assert text not in repr(door.audit)
