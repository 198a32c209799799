"""What operators do at the console, over HTTP: commands to workers, changes of keys, and who may not."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.system import Gateway, running_gateway, up_with_output
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.access import audit, keys
from tokenbus.protocol.access.audit_log import AuditLog
from tokenbus.protocol.bus import connection as nats

SIM = ["--engine", "sim", "--model", "steps-of-50ms"]
ON_DEMAND = ["--workers", "1", *SIM, "--served-name", "one", "--memory-budget-mib", "150"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[dict[str, Any]]:
    """A system with keys and an audit log, and a model on demand."""
    with up_with_output("--keys", "--audit", "--gateway-port", "0", *ON_DEMAND) as said:
        yield said


class Console:
    """Calls of the console's endpoints with one key."""

    def __init__(self, said: dict[str, Any], key: str) -> None:
        self.base = said["http"].removesuffix("/v1")
        self.key = key

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.base}/console/{path}", json=body, headers=self._named(headers), timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.base}/console/{path}", headers=self._named({}))

    def command(self, **fields: object) -> list[dict[str, Any]]:
        answered = self.post("control", fields)
        assert answered.status_code == 200, answered.text
        return [json.loads(line) for line in answered.text.splitlines()]

    def new_key(self, **fields: object) -> dict[str, Any]:
        made = self.post("keys", fields)
        assert made.status_code == 201, made.text
        found: dict[str, Any] = made.json()
        return found

    def _named(self, headers: dict[str, str]) -> dict[str, str]:
        return {name.replace("_", "-"): value for name, value in headers.items()} | {
            "authorization": f"Bearer {self.key}"
        }


@pytest.fixture
def operator(fleet: dict[str, Any]) -> Console:
    return Console(fleet, fleet["key"])


async def records(said: dict[str, Any], kind: audit.AuditKind, count: int) -> list[audit.AuditRecord]:
    """Waits for this many records of the audit log and returns them."""
    connection = await nats.connect(nats.BusSettings(url=said["nats"]), "test")
    try:
        async with asyncio.timeout(10):
            while True:
                stored, _ = await AuditLog(connection, "tokenbus.v1").page(1, audit.pattern_of(kind=kind))
                if len(stored) >= count:
                    return [one.record for one in stored if one.record is not None]
                await asyncio.sleep(0.05)
    finally:
        await connection.close()


async def known(said: dict[str, Any], key: str, status: int) -> None:
    """Waits until a key is answered with this status: a gateway follows a change of a key within a second."""
    async with asyncio.timeout(10):
        while Console(said, key).get("me").status_code != status:
            await asyncio.sleep(0.02)


async def test_an_operator_loads_and_unloads_a_model_on_demand_and_is_named_in_the_audit_log(
    fleet: dict[str, Any], operator: Console
) -> None:
    async with await WireClient.connect(fleet["nats"]) as client:
        (card,) = (await client.models()).cards
        assert card.loadable
        target = [["one", card.worker_id]]
        *_, loaded = operator.command(op="load", model="one", workers=target)
        assert loaded == {
            "model": "one",
            "worker_id": card.worker_id,
            "ok": True,
            "done": True,
            "progress": 1.0,
            "worker_ids": [card.worker_id],
        }
        assert [card.loadable for card in (await client.models()).cards] == [False]
        (unloaded,) = operator.command(op="unload", workers=target)
        assert (unloaded["ok"], unloaded["done"]) == (True, True)
        async with asyncio.timeout(10):
            while not (await client.models()).cards[0].loadable:
                await asyncio.sleep(0.02)
        refused = operator.command(op="load", model="no-such-file", workers=[*target, ["one", "nobody"]])
    answers = {one["worker_id"]: one for one in refused if one["done"]}
    assert answers[card.worker_id]["error"]["param"] == "model"
    assert answers["nobody"]["error"]["code"] == "no_worker"
    done = await records(fleet, "control", 3)
    assert [one.what for one in done][:3] == ["load", "load", "unload"]
    assert {(one.tenant, one.actor) for one in done} == {("default", keys.id_of(operator.key))}


async def test_a_key_is_made_shown_once_changed_rotated_and_revoked_by_whom_the_audit_log_names(
    fleet: dict[str, Any], operator: Console
) -> None:
    made = operator.new_key(tenant="acme", name="app", models=["chat-*"], limits={"concurrency": 3}, max_priority=2)
    assert (made["tenant"], made["limits"]["concurrency"], made["state"]) == ("acme", 3, "valid")
    await known(fleet, made["key"], 200)
    listed = operator.get("keys?text=app")
    assert [one["id"] for one in listed.json()["data"]] == [made["id"]]
    assert listed.headers["cache-control"] == "no-store"
    assert made["key"] not in listed.text
    assert "hash" not in listed.json()["data"][0]
    change = f"keys/{made['id']}/change"
    changed = operator.post(
        change, {"models": ["chat-a"], "limits": {"concurrency": 3, "max_tokens": 9}, "expires_at": "never"}
    ).json()
    assert (changed["models"], changed["limits"]["max_tokens"], changed["limits"]["concurrency"]) == (["chat-a"], 9, 3)
    assert changed["name"] == "app"
    assert "key" not in changed
    rotated = operator.post(f"keys/{made['id']}/rotate", {"grace_s": 60}).json()
    await known(fleet, rotated["key"], 200)
    await known(fleet, made["key"], 200)
    assert operator.post(f"keys/{made['id']}/revoke", {}).json()["state"] == "revoked"
    await known(fleet, rotated["key"], 401)
    done = await records(fleet, "key", 4)
    mine = [one for one in done if one.fields["key_id"] == made["id"]]
    assert [one.what for one in mine] == ["create", "change", "rotate", "revoke"]
    assert {one.actor for one in mine} == {keys.id_of(operator.key)}


@pytest.mark.parametrize("role", ["user", "viewer"])
async def test_only_operators_act(fleet: dict[str, Any], operator: Console, role: str) -> None:
    other = Console(fleet, operator.new_key(role=role)["key"])
    await known(fleet, other.key, 200)
    assert other.get("me").json()["can"] == (
        ["fleet", "requests", "usage"] if role == "viewer" else ["fleet", "requests", "chat", "usage"]
    )
    assert operator.get("me").json()["can"] == ["fleet", "requests", "chat", "operate", "keys", "usage"]
    for answered in (
        other.post("control", {"op": "drain", "workers": [["one", "worker-1"]]}),
        other.post("keys", {}),
        other.get("keys"),
        other.post(f"keys/{keys.id_of(operator.key)}/revoke", {}),
    ):
        assert (answered.status_code, answered.json()["error"]["code"]) == (403, "forbidden")
    assert Console(fleet, "tb_nobody").post("control", {}).status_code == 401


def test_what_is_asked_is_checked(operator: Console) -> None:
    wrong: list[tuple[str, dict[str, Any], str | None]] = [
        ("control", {"op": "stop", "workers": [["one", "a"]]}, "op"),
        ("control", {"op": "drain", "workers": []}, "workers"),
        ("control", {"op": "drain", "workers": [["one", ""]]}, "workers[0]"),
        ("control", {"op": "drain", "workers": [["one", "a"]], "grace_s": -1}, "grace_s"),
        ("keys", {"role": "king"}, "role"),
        ("keys", {"expires_at": 1}, "expires_at"),
        ("keys", {"limits": {"concurrency": -1}}, "limits.concurrency"),
        (f"keys/{keys.id_of(operator.key)}/rotate", {"grace_s": -1}, "grace_s"),
        (f"keys/{keys.id_of(operator.key)}/change", {}, None),
        (f"keys/{keys.id_of(operator.key)}/change", {"tenant": "other"}, "tenant"),
        (f"keys/{keys.id_of(operator.key)}/change", {"limits": {"speed": 1}}, "limits.speed"),
        (f"keys/{keys.id_of(operator.key)}/change", {"limits": {"max_tokens": -1}}, "limits.max_tokens"),
        (f"keys/{keys.id_of(operator.key)}/change", {"expires_at": "soon"}, "expires_at"),
        (f"keys/{keys.id_of(operator.key)}/change", {"name": "a\nb"}, "name"),
    ]
    for path, body, param in wrong:
        answered = operator.post(path, body)
        assert (answered.status_code, answered.json()["error"]["param"]) == (400, param), answered.text
    assert operator.post("keys", {"surprise": 1}).status_code == 400
    assert operator.post("keys/aaaaaaaaaa/revoke", {}).status_code == 404
    assert operator.post("keys/../../etc", {}).status_code in (404, 405)


@pytest.fixture(scope="module")
def local(slow_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway without keys that may act."""
    with running_gateway(slow_url, tmp_path_factory.mktemp("local"), "--console-operate") as gateway:
        yield gateway


CLEAR = {"op": "clear_cache", "workers": [["slow", "worker-1"]]}


def post(gateway: Gateway, content: bytes, **headers: str) -> httpx.Response:
    port = gateway.url.rpartition(":")[2].removesuffix("/v1")
    named = {"host": f"localhost:{port}", "content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return httpx.post(f"http://127.0.0.1:{port}/console/control", content=content, headers=named)


def test_without_keys_a_page_on_this_machine_may_act_and_no_page_from_elsewhere(local: Gateway) -> None:
    body = json.dumps(CLEAR).encode()
    port = local.url.rpartition(":")[2].removesuffix("/v1")
    own = post(local, body, sec_fetch_site="same-origin", origin=f"http://localhost:{port}")
    assert (own.status_code, json.loads(own.text)["ok"]) == (200, True)
    assert post(local, body, origin=f"http://localhost:{port}").status_code == 200
    for forged in (
        {"sec_fetch_site": "cross-site", "origin": "https://evil.example"},
        {"sec_fetch_site": "same-site", "origin": f"http://localhost:{port}"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"},
        {"x_forwarded_for": "10.0.0.1"},
    ):
        assert post(local, body, **forged).status_code == 403, forged
    assert post(local, body, content_type="text/plain").status_code == 415


def test_without_keys_there_are_none_to_change(local: Gateway) -> None:
    base = local.url.removesuffix("/v1")
    answered = httpx.post(f"{base}/console/keys", json={})
    assert (answered.status_code, answered.json()["error"]["code"]) == (404, "keys_not_used")


def test_a_gateway_acts_only_if_it_is_told_that_it_may(slow_gateway: Gateway) -> None:
    answered = post(slow_gateway, json.dumps(CLEAR).encode())
    assert answered.status_code == 403
    assert "--console-operate" in answered.json()["error"]["message"]


def test_a_gateways_own_keys_are_no_operators(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, "--console-operate", TOKENBUS_API_KEYS="sesame=acme") as gateway:
        answered = post(gateway, json.dumps(CLEAR).encode(), authorization="Bearer sesame")
    assert (answered.status_code, answered.json()["error"]["code"]) == (403, "forbidden")
