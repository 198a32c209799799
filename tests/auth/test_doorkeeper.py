"""How many refusals wait, and what is answered when."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.auth.test_callout_requests import REPLY, SEEDS, SERVER_KEY, claims
from tests.support.recording_bus import RecordingBus
from tokenbus.auth import doorkeeper, jwt, nats_keys
from tokenbus.auth.answers import MAX_CONNECTION_S, CalloutAnswers
from tokenbus.auth.brokers import Brokers
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.auth.connection_caps import ConnectionCaps
from tokenbus.auth.doorkeeper import MAX_DELAYED, Doorkeeper
from tokenbus.auth.instance import Instance
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bus import Callback
from tokenbus.protocol.wire.subjects import DEFAULT_PREFIX

MADE = keys.new_key()
NOW = 1_000.25


class AskingBus(RecordingBus):
    def new_inbox(self) -> str:
        return "_INBOX_auth.x"

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> None:
        assert (subject, queue) == ("$SYS.REQ.USER.AUTH", "tokenbus-auth")
        self._callback = callback

    def ask(self, key: str) -> None:
        token = SERVER_KEY.sign(claims(nats__connect_opts={"auth_token": key}))
        self._callback(SimpleNamespace(subject="", data=token, reply=REPLY, headers=None))  # type: ignore[arg-type]


async def opened(audit: Any = None, **fields: object) -> tuple[AskingBus, CalloutMetrics]:
    bus, ring, measured = AskingBus(), KeyRing(), CalloutMetrics()
    ring.put(KeyRecord(id=MADE.id, hash=MADE.hash, tenant="acme", **fields))  # type: ignore[arg-type]
    ring.heard(0.0)
    brokers = Brokers(bus, "$G")  # type: ignore[arg-type]
    instance = Instance(brokers, ring, DEFAULT_PREFIX, measured, audit, lambda: NOW, lambda: 0.0)
    keeper = Doorkeeper(instance, SEEDS, CalloutAnswers(SEEDS, "$G"), ConnectionCaps(instance))
    await keeper.open()
    return bus, measured


def claims_in(answer: bytes) -> dict[str, object]:
    """Returns the claims that the service has signed."""
    reader: jwt.JwtReader[dict[str, object]] = jwt.JwtReader(jwt.Claims[dict[str, object]], nats_keys.ACCOUNT)
    found: dict[str, object] = msgspec.to_builtins(reader.read(answer))
    assert found["iss"] == SEEDS.signer.public
    return found


async def users_end(bus: AskingBus) -> int:
    """Returns when the user ends that the only answer lets in."""
    (message,) = bus.take()
    assert message.subject == REPLY
    response = claims_in(message.payload)
    assert response["aud"] == SERVER_KEY.public
    user = claims_in(str(response["nats"]["jwt"]).encode())  # type: ignore[index]
    assert user["aud"] == "$G"
    assert user["sub"] == response["sub"]
    assert isinstance(user["exp"], int)
    return user["exp"]


async def test_a_user_lasts_for_an_hour_at_most_and_ends_with_its_key() -> None:
    bus, _ = await opened()
    bus.ask(MADE.text)
    assert NOW + 0.9 * MAX_CONNECTION_S - 1 <= await users_end(bus) <= NOW + MAX_CONNECTION_S
    bus, _ = await opened(expires_at=NOW + 60.0)
    bus.ask(MADE.text)
    assert await users_end(bus) == 1_060
    bus, _ = await opened(expires_at=NOW + 0.1)
    bus.ask(MADE.text)
    assert await users_end(bus) == 1_001  # the broker would refuse a user without a second to live


async def test_a_refusal_waits_and_further_ones_than_may_wait_are_never_sent(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(doorkeeper, "REFUSAL_DELAY_S", 0.05)
    bus, measured = await opened()
    for _ in range(MAX_DELAYED + 3):
        bus.ask("tb_wrong")
    assert not bus.take()
    assert measured.connects.labels("flood")._value.get() == 3
    bus.ask(MADE.text)  # the others do not keep it waiting
    assert len(bus.take()) == 1
    sent: list[object] = []
    async with asyncio.timeout(10):
        while len(sent) < MAX_DELAYED:
            await asyncio.sleep(0.01)
            sent += bus.take()
    bus.ask("tb_wrong")
    assert measured.connects.labels("flood")._value.get() == 3


async def test_who_claims_a_key_again_and_again_does_not_fill_the_audit_log() -> None:
    added: list[dict[str, object]] = []
    audit = SimpleNamespace(add=lambda kind, what, tenant, actor, **fields: added.append(fields))
    bus, _ = await opened(audit)
    for _ in range(100):
        bus.ask(f"{MADE.text[:14]}{'A' * 43}")
    assert added == [{"reason": "invalid", "address": "10.0.0.7", "count": 1}]
