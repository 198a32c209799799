"""A NATS client that shows a key gets that key's rights from a real broker, for as long as the key has them."""

import asyncio
import contextlib
import functools
import json
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import nats
import nats.errors
import pytest

from tests.support import key_broker
from tests.support.key_broker import PASSWORD, KeyBroker
from tests.support.raw_client import PREFIX
from tests.support.system import System, command, running_gateway
from tokenbus.auth.settings import AuthSettings
from tokenbus.client.client import Client
from tokenbus.client.errors import TokenbusError
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.audit import pattern_of
from tokenbus.protocol.access.audit_log import AuditLog, StoredRecord
from tokenbus.protocol.access.keys import KeyLimits, OldSecret, Role

REFUSED = b"-ERR 'Authorization Violation'"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[KeyBroker]:
    async with key_broker.running(tmp_path) as broker:
        yield broker


async def is_let_in(broker: KeyBroker, key: str) -> bool:
    answer = await broker.answer_to(auth_token=key)
    assert answer in (b"PONG", REFUSED)
    return answer == b"PONG"


async def test_a_key_gives_its_holder_the_subjects_of_its_tenant_models_and_id(broker: KeyBroker) -> None:
    key, record = await broker.new_key(models=("demo",))
    own, verbs = record.id, ("generate", "embed", "rerank", "tokenize", "detokenize", "cache")
    allowed = [f"{PREFIX}.{verb}.demo.acme.{own}" for verb in verbs]
    allowed += [
        f"{PREFIX}.{one}" for one in ("cancel.acme.r.demo", "resync.acme.r", "upload.acme.x.u", f"models.acme.{own}")
    ]
    endings = (f"other.acme.{own}", "demo.acme.aaaaaaaaaa", f"demo.globex.{own}", "demo.acme", "demo")
    others = {f"{PREFIX}.{verb}.{ending}" for verb in verbs for ending in endings}
    others |= {f"{PREFIX}.{one}" for one in ("cancel.globex.r", "cancel.r", "models.globex", "models", "discover")}
    others |= {f"{PREFIX}.worker.demo.w.run", f"{PREFIX}.worker.demo.w.control", f"_INBOX_key.acme.{own}.x", "$KV.x.y"}
    inboxes = {
        "_INBOX_key.acme.aaaaaaaaaa.1",
        "_INBOX_key.>",
        "_INBOX.x",
        f"{PREFIX}.generate.>",
        "$KV.tokenbus_v1_keys.>",
    }
    async with broker.auth():
        denied = await broker.denied(key, [*allowed, *others], [f"_INBOX_key.acme.{own}.1", *inboxes])
    assert denied == others | inboxes


async def test_a_viewer_only_looks_and_an_operator_also_controls(broker: KeyBroker) -> None:
    viewer, of_viewer = await broker.new_key(role=Role.VIEWER)
    operator, of_operator = await broker.new_key(role=Role.OPERATOR)
    control = (f"{PREFIX}.worker.demo.w.control", f"{PREFIX}.discover")
    asks = {one.id: f"{PREFIX}.generate.demo.acme.{one.id}" for one in (of_viewer, of_operator)}
    async with broker.auth():
        looks = f"{PREFIX}.models.acme.{of_viewer.id}"
        assert await broker.denied(viewer, [looks, asks[of_viewer.id], *control]) == {asks[of_viewer.id], *control}
        run = f"{PREFIX}.worker.demo.w.run"
        assert await broker.denied(operator, [asks[of_operator.id], *control, run], [f"{PREFIX}.card.>"]) == {run}


async def test_who_shows_no_valid_key_is_kept_out_with_a_reason_that_only_operators_see(broker: KeyBroker) -> None:
    key, _ = await broker.new_key()
    expired, _ = await broker.new_key(expires_at=1.0)
    async with broker.auth() as measured:
        for wrong in (f"{key[:-1]}{'B' if key[-1] == 'A' else 'A'}", "tb_", "x", expired):
            assert not await is_let_in(broker, wrong)
        assert await broker.answer_to() == REFUSED
        assert await broker.answer_to(user="router", **{"pass": key}) == REFUSED  # a process needs its password
        counts = {one: measured.connects.labels(one)._value.get() for one in ("invalid", "not_valid_now", "no_key")}
        assert counts == {"invalid": 3, "not_valid_now": 1, "no_key": 1}
        assert await broker.answer_to(user="anything", **{"pass": key}) == b"PONG"


async def test_changes_of_keys_and_who_is_kept_out_or_loses_its_connection_are_in_the_audit_log(
    broker: KeyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", PASSWORD)
    monkeypatch.setenv("TOKENBUS_AUDIT", "1")
    who = ("--nats", broker.url, "--nats-user", "operator", "--nats-inbox", "_INBOX_operator")

    async def run(*arguments: str) -> str:
        """Returns what a command of the operator prints."""
        asked = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        return str((await asyncio.to_thread(asked, command(*arguments, *who))).stdout)

    made = json.loads(await run("keys", "create", "--tenant", "acme", "--name", "app", "--json"))
    operator = await broker.use_bucket()
    async with broker.auth(audit=True):
        client = await broker.connect(made["key"])
        assert await broker.answer_to(auth_token=f"tb_{made['id']}_{'A' * 43}") == REFUSED
        await run("keys", "revoke", made["id"], "--yes")
        async with asyncio.timeout(60):
            await broker.disconnected.wait()
    assert client.is_closed or not client.is_connected
    records = [json.loads(line) for line in (await run("audit", "--key", made["id"][:6], "--json")).splitlines()]
    assert [(one["kind"], one["tenant"], one["what"]) for one in records[:2]] == [
        ("key", "acme", "create"),
        ("connection", "acme", "refused"),
    ]
    # the connection may be closed before the command has recorded why
    assert sorted((one["kind"], one["what"]) for one in records[2:]) == [("connection", "closed"), ("key", "revoke")]
    assert records[0]["fields"] == {"key_id": made["id"], "name": "app", "role": "user", "models": ["*"]}
    assert "@" in records[0]["actor"]
    assert records[1]["fields"] == {"reason": "invalid", "address": "127.0.0.1", "count": 1}
    assert made["key"] not in json.dumps(records)
    await operator.close()


async def test_no_other_user_hears_a_brokers_question_or_has_its_answer_taken(broker: KeyBroker) -> None:
    key, record = await broker.new_key()
    async with broker.auth():
        operator = await nats.connect(broker.url, user="operator", password=PASSWORD, inbox_prefix="_INBOX_operator")
        router = await nats.connect(broker.url, user="router", password=PASSWORD, inbox_prefix="_INBOX_router")
        broker.clients += [operator, router]
        heard: list[object] = []

        async def hear(message: object) -> None:
            heard.append(message)

        client = await broker.connect(key, record)
        for one in (client, operator, router):
            for subject in ("$SYS.REQ.USER.AUTH", "$SYS.>", ">"):
                with contextlib.suppress(nats.errors.Error):
                    await one.subscribe(subject, cb=hear)
            with contextlib.suppress(nats.errors.Error):
                await one.publish("$SYS.REQ.SERVER.PING.CONNZ", b"{}")
                await one.publish("$SYS._INBOX.aaaaaaaa.bbbbbbbb", b"forged")
            await one.flush()
        await broker.connect(key, record)
        assert not await is_let_in(broker, "wrong")
        for one in (client, operator, router):
            await one.flush()
        assert not heard


@pytest.mark.parametrize("where", ["file", "bucket"])
async def test_the_connections_of_a_revoked_key_end_within_a_second_and_of_no_other(
    broker: KeyBroker, where: str
) -> None:
    operator = await broker.use_bucket() if where == "bucket" else None
    key, record = await broker.new_key()
    other, of_other = await broker.new_key()
    async with broker.auth():
        await broker.connect(key, record)
        await broker.connect(key, record)
        untouched = await broker.connect(other, of_other)
        asked_at = time.time()
        await broker.change(record, revoked_at=asked_at)
        async with asyncio.timeout(5.0):
            while any(client.is_connected for client in broker.clients[:2]):
                await asyncio.sleep(0.005)
        # A file is looked at once a second.
        assert time.time() - asked_at < (1.0 if where == "bucket" else 1.5)
        assert untouched.is_connected
        assert not await is_let_in(broker, key)
        assert await is_let_in(broker, other)
    if operator is not None:
        await operator.close()


async def test_changes_that_no_instance_has_seen_count_when_one_starts(broker: KeyBroker) -> None:
    key, record = await broker.new_key()
    rotated, of_rotated = await broker.new_key()
    async with broker.auth():
        clients = [await broker.connect(key, record), await broker.connect(rotated, of_rotated)]
    made = keys.new_key(of_rotated.id)
    await broker.change(record, revoked_at=1.0)
    await broker.change(of_rotated, hash=made.hash)
    assert all(client.is_connected for client in clients)
    async with broker.auth(), broker.auth():
        async with asyncio.timeout(5.0):
            while any(client.is_connected for client in clients):
                await asyncio.sleep(0.005)
        assert await is_let_in(broker, made.text)


async def test_the_old_secret_of_a_rotated_key_lasts_until_its_time_is_over(broker: KeyBroker) -> None:
    key, record = await broker.new_key()
    async with broker.auth():
        client = await broker.connect(key, record)
        made = keys.new_key(record.id)
        ends_at = time.time() + 1.5
        await broker.change(record, hash=made.hash, old_secret=OldSecret(record.hash, ends_at))
        async with asyncio.timeout(5.0):  # its old connection has no end yet
            await broker.disconnected.wait()
        client = await broker.connect(key, record)
        await broker.connect(made.text, record)
        async with asyncio.timeout(5.0):
            while client.is_connected:
                await asyncio.sleep(0.005)
        assert abs(time.time() - ends_at) < 1.5  # whole seconds
        assert not await is_let_in(broker, key)
        assert broker.clients[-1].is_connected


async def test_a_key_is_revoked_on_every_broker_of_a_cluster(tmp_path: Path) -> None:
    async with key_broker.running(tmp_path, num_servers=2) as broker, contextlib.AsyncExitStack() as stack:
        key, record = await broker.new_key()
        async with asyncio.timeout(20):
            while not all("Route connection created" in (tmp_path / "nats.log").read_text() for _ in broker.servers):
                await asyncio.sleep(0.05)
        for _ in range(2):
            await stack.enter_async_context(broker.auth())  # on the first broker
        clients = [await broker.connect(key, record, server) for server in (0, 1, 1)]
        await broker.change(record, revoked_at=1.0)
        async with asyncio.timeout(5.0):
            while any(client.is_connected for client in clients):
                await asyncio.sleep(0.005)


async def test_a_key_has_no_more_connections_than_it_may_and_another_once_one_of_them_ends(broker: KeyBroker) -> None:
    key, record = await broker.new_key(limits=KeyLimits(connections=2))
    async with broker.auth(), broker.auth(), asyncio.timeout(20.0):
        clients = [await broker.connect(key, record) for _ in range(4)]
        while sum(client.is_connected for client in clients) > 2:
            await asyncio.sleep(0.005)
        assert [client.is_connected for client in clients] == [True, True, False, False], "the newest are closed"
        while await is_let_in(broker, key):
            await asyncio.sleep(0.005)
        await clients[0].close()
        while not await is_let_in(broker, key):
            await asyncio.sleep(0.005)
        assert clients[1].is_connected


async def test_a_stream_survives_the_connections_that_its_key_loses(
    broker: KeyBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", PASSWORD)
    prefixes = ("--inbox-prefix", "_INBOX_key.{tenant}")
    operator, system = await broker.use_bucket(), System(broker.servers[0], tmp_path)
    key, record = await broker.new_key()
    try:
        system.router("router", "--nats-user", "router", "--nats-inbox", "_INBOX_router", "--keys", "bucket", *prefixes)
        system.worker("worker", "--nats-user", "worker", "--nats-inbox", "_INBOX_worker", *prefixes)
        async with broker.auth() as measured, await Client.connect(broker.url, tenant="acme", token=key) as client:
            async with asyncio.timeout(60):
                while not await served(client):
                    await asyncio.sleep(0.05)
            texts: list[str] = []
            for num_changes in (0, 2):
                text = ""
                async for piece in client.generate(prompt="Once upon a time", max_tokens=400, ignore_eos=True, seed=1):
                    if num_changes and len(text) > 200:
                        num_changes -= 1
                        record = await broker.change(record, models=("demo", f"other{num_changes}"))
                        await asyncio.sleep(0.1)
                    text += piece.text
                texts.append(text)
        assert texts[0] == texts[1]
        assert measured.connects.labels("allowed")._value.get() >= 2
        assert measured.kicks.labels("changed")._value.get() >= 1
    finally:
        await operator.close()
        await system.stop()


async def test_a_gateway_with_an_operators_rights_acts_and_its_workers_name_the_key(
    broker: KeyBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", PASSWORD)
    prefixes = ("--inbox-prefix", "_INBOX_key.{tenant}")
    operator, system = await broker.use_bucket(), System(broker.servers[0], tmp_path)
    key, record = await broker.new_key(role=Role.OPERATOR)
    acting = ("--console-operate", "--keys", "bucket", "--audit", "--stored-responses-s", "0")
    try:
        who = ("--nats-user", "worker", "--nats-inbox", "_INBOX_worker", *prefixes)
        system.worker("w", *who, "--engine", "sim", "--audit", model="steps-of-50ms")

        def act(user: str, path: str, body: object) -> httpx2.Response:
            who = ("--nats-user", user, "--nats-inbox", f"_INBOX_{user}", "--tenant", user)
            with running_gateway(broker.url, tmp_path, *who, *acting) as gateway:
                url = f"{gateway.url.removesuffix('/v1')}/console/{path}"
                return httpx2.post(url, json=body, headers={"x-api-key": key}, timeout=30)

        await system.until_logged("w", "engine_ready")
        told = {"op": "clear_cache", "workers": [["demo", "w"]]}
        refused = (await asyncio.to_thread(act, "gateway", "control", told)).json()
        assert (refused["ok"], refused["error"]["code"]) == (False, "forbidden")
        assert (await asyncio.to_thread(act, "operator", "control", told)).json()["ok"]
        made = await asyncio.to_thread(act, "operator", "keys", {"tenant": "globex"})
        assert (made.status_code, made.json()["warning"]) == (201, "")
        assert made.json()["id"] in (await broker.store.load()).records
        async with asyncio.timeout(10):
            stored: list[StoredRecord] = []
            while len(stored) < 2:
                stored, _ = await AuditLog(operator, AuthSettings().prefix).page(1, pattern_of())
    finally:
        await operator.close()
        await system.stop()
    found = {(one.record.kind, one.record.tenant, one.record.what, one.record.actor) for one in stored if one.record}
    assert found == {("control", "acme", "clear_cache", record.id), ("key", "globex", "create", record.id)}


async def served(client: Client) -> bool:
    try:
        return bool(await client.models())
    except TokenbusError:  # no router yet
        return False
