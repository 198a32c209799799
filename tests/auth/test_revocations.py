"""Which of the connections that brokers list are closed."""

import datetime
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.recording_bus import RecordingBus
from tokenbus.auth import grants
from tokenbus.auth.brokers import Brokers
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.auth.instance import Instance
from tokenbus.auth.revocations import Revocations
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord
from tokenbus.protocol.bus.bus import Callback
from tokenbus.protocol.wire.subjects import DEFAULT_PREFIX

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
MADE = keys.new_key()
RECORD = KeyRecord(id=MADE.id, hash=MADE.hash, tenant="acme")
USER = grants.grant_of(RECORD, MADE.hash, DEFAULT_PREFIX).user


class ListeningBus(RecordingBus):
    """A bus on which brokers answer."""

    def new_inbox(self) -> str:
        return "_INBOX_auth.x"

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> None:
        assert subject == "_INBOX_auth.x.*"
        self._callback = callback

    def answer(self, connections: list[dict[str, Any]], age_s: float = 1.0, about: str = "all", **fields: Any) -> None:
        listed = [{"start": START.isoformat(), **one} for one in connections]
        listing = {"server_id": "NS", "now": (START + datetime.timedelta(seconds=age_s)).isoformat(), **fields}
        self.say(json.dumps({"data": {**listing, "connections": listed}}).encode(), about)

    def say(self, payload: bytes, about: str = "all") -> None:
        self._callback(SimpleNamespace(subject=f"_INBOX_auth.x.{about}", data=payload, headers=None))  # type: ignore[arg-type]

    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        return [(one.subject.removeprefix("$SYS.REQ.SERVER."), json.loads(one.payload)) for one in self.take()]


class Scene:
    def __init__(self) -> None:
        self.bus = ListeningBus()
        self.ring = KeyRing()
        self.ring.put(RECORD)
        self.ring.heard(0.0)
        self.clock = 0.0
        self.metrics = CalloutMetrics()
        brokers = Brokers(self.bus, "$G")  # type: ignore[arg-type]
        self.revocations = Revocations(
            Instance(brokers, self.ring, DEFAULT_PREFIX, self.metrics, None, lambda: 1e9, lambda: self.clock)
        )


@pytest.fixture
async def scene() -> Scene:
    scene = Scene()
    await scene.revocations.open()
    return scene


async def test_only_connections_with_rights_that_their_key_no_longer_gives_are_closed(scene: Scene) -> None:
    users = [USER, f"{MADE.id}-{'0' * 12}", f"aaaaaaaaaa-{'0' * 12}", "router", "", f"{MADE.id}"]
    scene.bus.answer([{"cid": cid, "authorized_user": user} for cid, user in enumerate(users)])
    assert scene.bus.asked() == [("NS.KICK", {"cid": 1}), ("NS.KICK", {"cid": 2})]
    assert scene.metrics.kicks.labels("changed")._value.get() == 2


async def test_nothing_is_closed_while_the_store_of_keys_is_silent(scene: Scene) -> None:
    scene.clock = 5.1
    scene.bus.answer([{"cid": 1, "authorized_user": f"aaaaaaaaaa-{'0' * 12}"}])
    assert not scene.bus.asked()


async def test_each_connection_is_renewed_before_its_hour_is_over_and_not_all_at_once(scene: Scene) -> None:
    connections = [{"cid": cid, "authorized_user": USER} for cid in range(100)]
    closed = []
    for minute in range(54):
        scene.bus.answer(connections, age_s=60.0 * minute)
        closed.append(len(scene.bus.asked()))
    assert closed[36] == 0
    assert closed[52] == 100
    assert all(0 <= later - earlier < 20 for earlier, later in zip(closed, closed[1:], strict=False))


async def test_the_next_page_of_a_broker_is_asked_for_until_it_was_the_last(scene: Scene) -> None:
    scene.bus.answer([{"cid": 1, "authorized_user": USER}] * 2, total=5, offset=2, about=USER)
    ((subject, asked),) = scene.bus.asked()
    assert subject == "NS.CONNZ"
    assert (asked["offset"], asked["user"], asked["acc"]) == (4, USER, "$G")
    scene.bus.answer([{"cid": 1, "authorized_user": USER}], total=5, offset=4)
    scene.bus.answer([], total=5, offset=4)
    assert not scene.bus.asked()


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b'{"data": 1}', b"\xff", b'{"data": {"server_id": 1}}', b"[" * 9_000]
)
async def test_an_answer_that_is_not_understood_is_passed_over(scene: Scene, payload: bytes) -> None:
    scene.bus.say(payload)
    scene.bus.say(b'{"error": {"code": 500}}')
    assert not scene.bus.asked()


async def test_a_bus_that_takes_nothing_ends_nothing(scene: Scene) -> None:
    scene.bus.is_busy = True
    scene.bus.answer([{"cid": 2, "authorized_user": f"aaaaaaaaaa-{'0' * 12}"}])
    scene.bus.is_busy = False
    assert not scene.bus.asked()


async def test_connections_are_looked_for_only_after_changes_that_take_rights_away(scene: Scene) -> None:
    lost = scene.revocations
    scene.ring.put(msgspec.structs.replace(RECORD, name="other", limits=KeyLimits(max_tokens=1)))
    assert "0 to look for" in repr(lost)
    scene.ring.put(msgspec.structs.replace(RECORD, models=("demo",)))
    assert "1 to look for" in repr(lost)
    scene.bus.answer([{"cid": 3, "authorized_user": USER}])
    assert scene.bus.asked() == [("NS.KICK", {"cid": 3})], "it has the rights of the models that the key had"
