"""With the permissions of deploy/nats.conf nobody can do what their role does not allow."""

import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from tests.support import page_client
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System, command, running_gateway
from tokenbus import demo
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.settings import Credentials
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.subjects import Subjects

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"
USERS = ("router", "worker-demo", "worker-other", "operator", "gateway", "default", "acme", "globex")
LONG = {"max_tokens": 500, "ignore_eos": True}
TENANTS_ONLY = ("--inbox-prefix", "_INBOX_{tenant}")


class Guarded:
    """A system whose broker requires credentials."""

    def __init__(self, system: System, passwords: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.system = system
        self.passwords = passwords
        self.clients: list[Nats] = []
        self.violations: list[str] = []
        self._monkeypatch = monkeypatch

    def router(self, name: str, *arguments: str) -> None:
        self._monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", self.passwords["router"])
        self.system.router(name, "--nats-user", "router", "--nats-inbox", "_INBOX_router", *TENANTS_ONLY, *arguments)

    def worker(self, name: str, *arguments: str, model: str | Path, served_name: str) -> None:
        user = f"worker-{served_name}"
        self._monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", self.passwords[user])
        who = ("--nats-user", user, "--nats-inbox", f"_INBOX_worker_{served_name}", *TENANTS_ONLY)
        self.system.worker(name, *who, *arguments, model=model, served_name=served_name)

    async def connect(self, user: str, inbox: str) -> Nats:
        async def note(error: Exception) -> None:
            self.violations.append(f"{user}: {error}")

        client = await nats.connect(
            self.system.url,
            user=user,
            password=self.passwords[user],
            inbox_prefix=inbox,
            error_cb=note,
            allow_reconnect=False,
        )
        self.clients.append(client)
        return client

    async def refuses(self, user: str, what: str) -> None:
        """Waits until the broker has denied something to a user since the last call."""
        async with asyncio.timeout(60):
            while not any(user in line and what.lower() in line.lower() for line in self.violations):
                await asyncio.sleep(0.01)
        self.violations.clear()

    async def disconnect(self) -> None:
        """Closes the clients and forgets what was refused to them."""
        for client in self.clients:
            await client.close()
        self.clients.clear()
        self.violations.clear()

    def check_nothing_was_refused(self, *processes: str) -> None:
        assert not self.violations
        for name in processes:
            assert "permissions violation" not in self.system.text_log(name).lower(), name


@contextlib.contextmanager
def guarded_broker(folder: Path, max_payload: str = "1MB") -> Iterator[Guarded]:
    """Runs a broker with the file's permissions, without routers and workers."""
    config = folder / "nats.conf"
    text = CONFIG.read_text().replace("max_payload: 1MB", f"max_payload: {max_payload}")
    config.write_text(text.replace('# jetstream { store_dir: "/data"', f'jetstream {{ store_dir: "{folder}"'))
    passwords = {user: f"p{secrets.token_hex(8)}" for user in USERS}  # digits alone would be read as a number
    with pytest.MonkeyPatch.context() as monkeypatch:
        for user, password in passwords.items():
            monkeypatch.setenv(f"TOKENBUS_{user.replace('-', '_').upper()}_PASSWORD", password)
        system = asyncio.run(System.start(folder, config))
        yield Guarded(system, passwords, monkeypatch)
        asyncio.run(system.stop())


@pytest.fixture
def unshared(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with guarded_broker(tmp_path, getattr(request, "param", "1MB")) as guarded:
        yield guarded


@pytest.fixture
async def empty(unshared: Guarded) -> AsyncIterator[Guarded]:
    """A broker of the test's own without routers and workers; `max_payload` may be another than the file's."""
    yield unshared
    await unshared.disconnect()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("guarded")) as guarded:
        guarded.router("router")
        start_workers(guarded)
        yield guarded


@pytest.fixture
async def guarded(shared: Guarded) -> AsyncIterator[Guarded]:
    """A router, and a worker of each of two models, for tests that leave them running."""
    yield shared
    await shared.disconnect()


def start_workers(guarded: Guarded) -> None:
    for name, path in (("demo", demo.MODEL_PATH), ("other", demo.ONNX_PATH)):
        guarded.worker(f"w-{name}", model=path, served_name=name)


async def until_served(client: Nats, tenant: str, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                reply = await client.request(f"{PREFIX}.models.{tenant}", b"", timeout=1)
                if len(json.loads(reply.data)["models"]) >= count:
                    return
            except Exception:  # no router yet
                pass
            await asyncio.sleep(0.05)


async def listen(client: Nats, subject: str) -> list[Msg]:
    seen: list[Msg] = []

    async def take(message: Msg) -> None:
        seen.append(message)

    await client.subscribe(subject, cb=take)
    await RawClient(client).settle()
    return seen


async def card_of(client: Nats, model: str) -> dict[str, Any]:
    """Returns the card of a model's only worker from the router, without the fields that change by themselves."""
    reply = json.loads((await client.request(f"{PREFIX}.models.acme", b"", timeout=5)).data)
    (card,) = next(one["workers"] for one in reply["models"] if one["model"] == model)
    return {name: value for name, value in card.items() if name not in ("load", "watched")}


def ask(**fields: Any) -> bytes:
    return json.dumps({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0, **fields}).encode()


async def test_workers_ask_only_workers_of_their_model_for_blocks(guarded: Guarded) -> None:
    demo_worker = await guarded.connect("worker-demo", "_INBOX_worker_demo")
    for service in ("kv", "kv.read", "kv.reply.1", "kv.upload.x"):
        await demo_worker.publish(f"{PREFIX}.worker.demo.w.{service}", b"")
    await demo_worker.flush()
    assert not guarded.violations
    for subject in ("worker.other.w.kv", "worker.demo.w.run", "worker.demo.w.control", "worker.demo.w.take"):
        guarded.violations.clear()
        await demo_worker.publish(f"{PREFIX}.{subject}", b"")
        await demo_worker.flush()
        async with asyncio.timeout(5):
            while not guarded.violations:
                await asyncio.sleep(0.01)
    guarded.violations.clear()


async def test_everyone_can_do_what_is_their_role(guarded: Guarded) -> None:
    acme = await guarded.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 2)
    for model in ("demo", "other"):
        answer = await RawClient(acme).ask(ask(), subject=f"{PREFIX}.generate.{model}.acme")
        assert answer.text == " 42"
    reply = await acme.request(f"{PREFIX}.embed.other.acme", b'{"input": "x"}', timeout=60)
    assert len(json.loads(reply.data)["embeddings"]) == 1
    reply = await acme.request(f"{PREFIX}.tokenize.demo.acme", b'{"prompt": "12 + 30 ="}', timeout=60)
    found = json.loads(reply.data)["token_ids"]
    payload = json.dumps({"token_ids": found}).encode()
    reply = await acme.request(f"{PREFIX}.detokenize.demo.acme", payload, timeout=60)
    assert json.loads(reply.data)["text"] == "12 + 30 ="
    asked = b'{"query": "x", "documents": ["y"]}'
    refused = json.loads((await acme.request(f"{PREFIX}.rerank.other.acme", asked, timeout=60)).data)
    assert refused["error"]["code"] == "unsupported"
    default = await guarded.connect("default", "_INBOX_default")
    refused = json.loads((await default.request(f"{PREFIX}.rerank.other", asked, timeout=60)).data)
    assert refused["error"]["code"] == "unsupported"
    assert (await RawClient(default).ask(ask())).text == " 42"
    long = await RawClient(acme).generate(ask(id="mine", **LONG), subject=f"{PREFIX}.generate.demo.acme")
    await long.until(3)
    assert json.loads((await acme.request(f"{PREFIX}.cancel.acme.mine", b"", timeout=60)).data) == {"cancelled": True}
    assert (await long.terminal())["finish_reason"] == "cancelled"
    router = await guarded.connect("router", "_INBOX_router")
    await router.publish(f"{PREFIX}.cancel.acme.mine", b"")  # as it does when a cancel has overtaken an accept
    await router.flush()
    operator = await guarded.connect("operator", "_INBOX_operator")
    control = f"{PREFIX}.worker.demo.w-demo.control"
    assert json.loads((await operator.request(f"{PREFIX}.models.operator", b"", timeout=60)).data)["models"]
    assert (await operator.request(control, b"\x81\xa2op\xabclear_cache", timeout=60)).data
    guarded.check_nothing_was_refused("router", "w-demo", "w-other")


async def until_workers(client: Nats, count: int) -> None:
    """Waits until so many workers of the model `demo` are ready."""
    async with asyncio.timeout(60):
        while True:
            models = json.loads((await client.request(f"{PREFIX}.models.acme", b"", timeout=60)).data)["models"]
            if sum(card["state"] == "ready" for served in models for card in served["workers"]) == count:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("unshared", "prompt"),
    [pytest.param("1MB", [1], marks=pytest.mark.long), ("64KB", [1] * 60_000)],
    indirect=["unshared"],
    ids=["small", "in parts"],
)
async def test_streams_survive_their_router_and_then_their_worker(empty: Guarded, prompt: list[int]) -> None:
    system = empty.system
    routers, workers = ("router-a", "router-b"), ("w-a", "w-b")
    for name in routers:
        empty.router(name)
    for name in workers:
        flags = ("--engine", "sim", "--grace-s", "0", "--context-length", "65536", "--sim-speedup", "2")
        empty.worker(name, *flags, model="dynamo", served_name="demo")
    acme = await empty.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 1)
    for name in routers:
        await system.until_logged(name, "router_ready")
    await until_workers(acme, 2)
    request = {"token_ids": prompt, "max_tokens": 1_500, "ignore_eos": True}
    live = await page_client.submit(acme, f"{PREFIX}.generate.demo.acme", request)
    await live.until(3)
    its_worker = next(message["worker_id"] for message in live.messages if message["worker_id"])
    its_router = await system.first_to_log(routers, "request_placed")
    system.signal(its_router, signal.SIGKILL)
    await system.until_logged(its_worker, "guardian_changed")
    system.signal(its_worker, signal.SIGTERM)
    terminal = await live.terminal()
    assert (terminal["finish_reason"], terminal["attempt"]) == ("length", 2)
    assert {its_worker, terminal["worker_id"]} == set(workers)
    check_stream(live)
    assert await system.wait(its_worker) == 0
    empty.check_nothing_was_refused(*routers, *workers)


async def test_routers_and_workers_may_learn_from_the_broker_that_the_other_is_gone(empty: Guarded) -> None:
    system, workers = empty.system, ("w-a", "w-b")
    empty.router("router")
    for name in workers:
        empty.worker(name, "--engine", "sim", "--context-length", "65536", model="dynamo", served_name="demo")
    acme = await empty.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 1)
    await until_workers(acme, 2)
    request = {"token_ids": list(range(64)), "max_tokens": 300, "ignore_eos": True}
    live = await page_client.submit(acme, f"{PREFIX}.generate.demo.acme", request)
    await live.until(3)
    its_worker = next(message["worker_id"] for message in live.messages if message["worker_id"])
    system.signal(its_worker, signal.SIGKILL)
    assert (await live.terminal())["attempt"] == 2
    check_stream(live)
    (lost,) = system.logged("router", "worker_lost")
    assert lost["reason"] == "disconnected"
    as_worker = await empty.connect("worker-demo", "_INBOX_worker_demo")
    with pytest.raises(nats.errors.NoRespondersError):  # and not a refusal
        await as_worker.request(Subjects().given_up("demo", its_worker, "1-a"), b"")
    empty.check_nothing_was_refused("router", *workers)


async def test_a_router_that_stops_hands_over_what_waits(empty: Guarded) -> None:
    system = empty.system
    empty.router("router-a")
    empty.worker("w", "--engine", "sim", "--max-num-seqs", "2", model="dynamo", served_name="demo")
    acme = await empty.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 1)
    subject = f"{PREFIX}.generate.demo.acme"
    running = [
        await RawClient(acme).generate(ask(id=f"running-{number}", max_tokens=10_000), subject=subject)
        for number in range(3)  # one of them waits in the worker
    ]
    waiting = await RawClient(acme).generate(ask(id="waiting"), subject=subject)
    await waiting.until(1)
    assert waiting.messages[0]["worker_id"] is None  # the router says that it waits
    empty.router("router-b")
    await system.until_logged("router-b", "router_ready")
    system.signal("router-a", signal.SIGTERM)
    assert await system.wait("router-a") == 0
    for number in range(3):
        await acme.publish(f"{PREFIX}.cancel.acme.running-{number}", b"")
    assert (await waiting.terminal())["finish_reason"] == "length"
    assert [(await answer.terminal())["finish_reason"] for answer in running] == ["cancelled"] * 3
    adopted = [line["request_id"] for line in system.log("router-b") if line["event"] == "request_adopted"]
    assert "acme:waiting" in adopted
    check_stream(waiting)
    empty.check_nothing_was_refused("router-a", "router-b", "w")


async def test_only_routers_and_workers_of_the_model_speak_of_guardians(guarded: Guarded) -> None:
    await until_served(await guarded.connect("acme", "_INBOX_acme"), "acme", 2)
    offers, checks, take = (
        f"{PREFIX}.guard.demo.w-demo",
        f"{PREFIX}.router.router",
        f"{PREFIX}.worker.demo.w-demo.take",
    )
    denied = {
        "acme": (offers, f"{PREFIX}.guard.demo", checks, take),
        "default": (offers, f"{PREFIX}.guard.demo", checks, take),
        "gateway": (offers, f"{PREFIX}.guard.demo", checks, take),
        "operator": (offers, f"{PREFIX}.guard.demo", checks, take),
        "worker-other": (offers, f"{PREFIX}.guard.demo", f"{PREFIX}.guard.other", take),
        "router": (offers, checks),
    }
    for user, subjects in denied.items():
        client = await guarded.connect(user, f"_INBOX_{user.replace('-', '_')}")
        for subject in subjects:
            await client.publish(subject, b"")
            await guarded.refuses(user, subject)
        for subject in (f"{PREFIX}.guard.>", f"{PREFIX}.router.*") if user != "router" else ():
            await client.subscribe(subject)
            await guarded.refuses(user, "subscription")


async def test_a_gateway_asks_for_the_tenants_of_its_keys_and_for_nobody_else(guarded: Guarded, tmp_path: Path) -> None:
    acme = await guarded.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 2)
    inboxes = ("--nats-inbox", "_INBOX_gateway", "--tenant-inbox", "_INBOX_{tenant}.gateway")
    secret = {"TOKENBUS_NATS_PASSWORD": guarded.passwords["gateway"], "TOKENBUS_API_KEYS": "sk-a=acme,sk-g=globex"}
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    own = running_gateway(
        guarded.system.url, tmp_path, "--nats-user", "gateway", "--tenant", "gateway", *inboxes, **secret
    )
    keys = [{"Authorization": f"Bearer {key}"} for key in ("sk-a", "sk-g")]
    with own as gateway:
        await check_stored_responses(gateway.url, *keys)
        for key in ("sk-a", "sk-g"):
            async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
                answer = await http.post(f"{gateway.url}/chat/completions", json=asked)
                assert answer.json()["choices"][0]["message"]["content"] == "12 + 30 = 42."
                assert {model["id"] for model in (await http.get(f"{gateway.url}/models")).json()["data"]} == {
                    "demo",
                    "other",
                }
        assert [line["place"] for line in gateway.log("responses_kept")] == ["jetstream"]
    client = await guarded.connect("gateway", "_INBOX_gateway")
    for subject in (f"{PREFIX}.generate.demo", f"{PREFIX}.generate.demo.other", f"{PREFIX}.worker.demo.w-demo.run"):
        await client.publish(subject, ask())
        await guarded.refuses("gateway", subject)
    await client.subscribe("_INBOX_acme.>")
    await guarded.refuses("gateway", "subscription")


async def check_stored_responses(url: str, acme: dict[str, str], globex: dict[str, str]) -> None:
    """A tenant's responses are in the broker's bucket, and no other tenant's requests find them."""
    asked = {"model": "demo", "input": "What is 12 + 30?", "temperature": 0}
    async with httpx2.AsyncClient(timeout=60) as http:
        first = (await http.post(f"{url}/responses", json=asked, headers=acme)).json()
        assert first["store"]
        path, more = f"{url}/responses/{first['id']}", asked | {"previous_response_id": first["id"]}
        for headers, status in ((acme, 200), (globex, 404)):
            assert (await http.get(path, headers=headers)).status_code == status
        assert (await http.post(f"{url}/responses", json=more, headers=globex)).status_code == 400
        assert (await http.delete(path, headers=globex)).status_code == 404
        second = (await http.post(f"{url}/responses", json=more, headers=acme)).json()
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]


async def test_a_client_can_not_reach_workers_others_inboxes_or_others_subjects(guarded: Guarded) -> None:
    acme = await guarded.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 2)
    for subject in (
        f"{PREFIX}.upload.globex.0f1e2d3c.4b5a6978",
        f"{PREFIX}.router.router.upload.4b5a6978",
        f"{PREFIX}.worker.demo.w-demo.upload.4b5a6978",
        f"{PREFIX}.worker.demo.w-demo.run",
        f"{PREFIX}.worker.demo.w-demo.control",
        f"{PREFIX}.generate.demo",
        f"{PREFIX}.generate.demo.globex",
        f"{PREFIX}.cancel.globex.their-id",
        f"{PREFIX}.cancel.their-id",
        f"{PREFIX}.resync.globex.their-id",
        f"{PREFIX}.events.demo.w-demo",
        f"{PREFIX}.beat.demo.w-demo",
        f"{PREFIX}.card.demo.w-demo",
        "_INBOX_globex.x",
    ):
        await acme.publish(subject, ask())
        await guarded.refuses("acme", subject)
    for subject in ("_INBOX_globex.>", f"{PREFIX}.generate.>", f"{PREFIX}.worker.>", f"{PREFIX}.events.>", ">"):
        await acme.subscribe(subject)
        await guarded.refuses("acme", "subscription")


async def test_nothing_is_sent_to_an_inbox_that_is_not_the_tenant_s_own(guarded: Guarded) -> None:
    acme = await guarded.connect("acme", "_INBOX_acme")
    globex = await guarded.connect("globex", "_INBOX_globex")
    await until_served(acme, "acme", 2)
    seen = await listen(globex, "_INBOX_globex.>")
    for reply in ("_INBOX_globex.victim", f"{PREFIX}.worker.demo.w-demo.control", "_INBOX_router.x", "_INBOX.x"):
        await acme.publish(f"{PREFIX}.generate.demo.acme", ask(id="sly"), reply=reply)
        await acme.publish(f"{PREFIX}.embed.other.acme", b'{"input": "x"}', reply=reply)
        await acme.publish(f"{PREFIX}.tokenize.demo.acme", b'{"id": "sly", "prompt": "x"}', reply=reply)
        await acme.publish(f"{PREFIX}.detokenize.demo.acme", b'{"id": "sly", "token_ids": [5]}', reply=reply)
        await acme.publish(f"{PREFIX}.rerank.other.acme", b'{"query": "x", "documents": ["y"]}', reply=reply)
        await acme.publish(f"{PREFIX}.models.acme", b"", reply=reply)
    own = await RawClient(acme).generate(ask(id="own", **LONG), subject=f"{PREFIX}.generate.demo.acme")
    await own.until(3)
    for verb in ("cancel", "resync"):
        await acme.publish(f"{PREFIX}.{verb}.acme.own", b'{"offset": 0}', reply="_INBOX_globex.victim")
    await acme.request(f"{PREFIX}.cancel.acme.own", b"", timeout=60)
    await own.terminal()
    assert (await RawClient(globex).ask(ask(), subject=f"{PREFIX}.generate.demo.globex")).text == " 42"
    assert {message.subject for message in seen if b'"id":"sly"' in message.data or b"victim" in message.data} == set()
    assert not any(message.subject == "_INBOX_globex.victim" for message in seen)


async def test_a_tenant_can_not_cancel_another_s_request_of_the_same_id(guarded: Guarded) -> None:
    acme = await guarded.connect("acme", "_INBOX_acme")
    globex = await guarded.connect("globex", "_INBOX_globex")
    await until_served(acme, "acme", 2)
    theirs = await RawClient(globex).generate(
        ask(id="same", max_tokens=200, ignore_eos=True), subject=f"{PREFIX}.generate.demo.globex"
    )
    await theirs.until(3)
    await acme.publish(f"{PREFIX}.cancel.acme.same", b"")
    assert (await theirs.terminal())["finish_reason"] == "length"


async def until_heard(client: Nats, subject: str, payload: bytes) -> Msg:
    """Sends a request again while nothing answers: a worker may not have noticed yet that its only router is gone, and
    the broker may have given a request to that router after its end."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(nats.errors.NoRespondersError, TimeoutError):
                return await client.request(subject, payload, timeout=1)
            await asyncio.sleep(0.05)


async def test_a_stream_is_asked_for_and_cancelled_while_there_is_no_router(empty: Guarded) -> None:
    empty.router("router")
    start_workers(empty)
    acme = await empty.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 2)
    live = await RawClient(acme).generate(ask(id="live", **LONG), subject=f"{PREFIX}.generate.demo.acme")
    await live.until(3)
    empty.system.kill("router")
    for verb, answer in (("resync", {"found": True}), ("cancel", {"cancelled": True})):
        reply = await until_heard(acme, f"{PREFIX}.{verb}.acme.live.demo", b'{"offset": 0}')
        assert json.loads(reply.data) == answer
    assert (await live.terminal())["finish_reason"] == "cancelled"
    empty.check_nothing_was_refused("w-demo", "w-other")


async def test_only_an_operator_can_stop_a_request_and_a_worker(guarded: Guarded) -> None:
    acme, globex = [await guarded.connect(name, f"_INBOX_{name}") for name in ("acme", "globex")]
    await until_served(acme, "acme", 2)
    live = await RawClient(acme).generate(ask(id="live", **LONG), subject=f"{PREFIX}.generate.demo.acme")
    await live.until(3)
    control = f"{PREFIX}.worker.demo.w-demo.control"
    stop = {"op": "stop", "request_id": "acme:live"}
    for name, client in (("acme", acme), ("globex", globex)):
        for order in (stop, {"op": "drain", "grace_s": 0.0, "handover_s": 0.0}):
            await client.publish(control, msgspec.msgpack.encode(order))
            await guarded.refuses(name, control)
    operator = await guarded.connect("operator", "_INBOX_operator")
    other = msgspec.msgpack.encode(stop | {"request_id": "globex:live"})
    assert not msgspec.msgpack.decode((await operator.request(control, other, timeout=60)).data)["ok"]
    done = await operator.request(control, msgspec.msgpack.encode(stop), timeout=60)
    assert msgspec.msgpack.decode(done.data)["ok"]
    terminal = await live.terminal()
    assert (terminal["finish_reason"], terminal["stopped_by"]) == ("length", "operator")
    assert terminal["usage"]["completion_tokens"] < LONG["max_tokens"]


async def test_an_operator_reads_in_the_audit_log_who_did_what_and_nobody_else_does(
    empty: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty.router("router", "--audit")
    empty.worker("w-demo", "--audit", model=demo.MODEL_PATH, served_name="demo")
    acme, operator = [await empty.connect(name, f"_INBOX_{name}") for name in ("acme", "operator")]
    await until_served(acme, "acme", 1)
    client, subject = RawClient(acme), f"{PREFIX}.generate.demo.acme"
    assert (await (await client.generate(ask(id="r1"), subject=subject)).terminal())["finish_reason"] == "length"
    assert (await (await client.generate(ask(id="r2", top_p=7), subject=subject)).terminal())["error"]
    order = msgspec.msgpack.encode({"op": "drain", "grace_s": 0.0, "handover_s": 0.0})
    await operator.request(f"{PREFIX}.worker.demo.w-demo.control", order, timeout=60)
    await empty.system.wait("w-demo")

    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", empty.passwords["operator"])
    who = ("--nats-user", "operator", "--nats-inbox", "_INBOX_operator", "--nats", empty.system.url)
    read = await asyncio.to_thread(
        subprocess.run, command("audit", "--json", *who), capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in read.stdout.splitlines()]
    told = {(one["kind"], one["tenant"], one["actor"], one["what"]): one["fields"] for one in records}
    requests = [one["fields"] for one in records if one["kind"] == "request"]
    assert requests == [
        {
            "model": "demo",
            "request_id": "r1",
            "outcome": "length",
            "prompt_tokens": requests[0]["prompt_tokens"],
            "completion_tokens": 3,
        },
        {"model": "demo", "request_id": "r2", "outcome": "error", "code": "invalid_request"},
    ]
    assert told["control", "", "_INBOX_operator", "drain"] == {"worker_id": "w-demo", "ok": True}
    empty.check_nothing_was_refused("router", "w-demo")
    for name in ("acme", "router"):
        other = await empty.connect(name, f"_INBOX_{name}")
        for denied in ("tokenbus.v1.audit.acme.key", "$JS.API.DIRECT.GET.tokenbus_v1_audit"):
            await other.publish(denied, b"{}")
            await empty.refuses(name, denied)


async def test_an_operator_can_not_read_completions(guarded: Guarded) -> None:
    operator = await guarded.connect("operator", "_INBOX_operator")
    for subject in (f"{PREFIX}.events.>", f"{PREFIX}.events.demo.w-demo", "_INBOX_acme.>", f"{PREFIX}.worker.>"):
        await operator.subscribe(subject)
        await guarded.refuses("operator", "subscription")


async def test_a_worker_s_credentials_can_not_read_prompts_of_other_models(guarded: Guarded) -> None:
    worker = await guarded.connect("worker-other", "_INBOX_worker_other")
    for subject in (f"{PREFIX}.worker.demo.>", f"{PREFIX}.generate.>", f"{PREFIX}.generate.demo", "_INBOX_acme.>", ">"):
        await worker.subscribe(subject)
        await guarded.refuses("worker-other", "subscription")
    for verb in ("cancel", "resync"):
        for forms in ("*", "acme.*", "*.*", "*.*.demo", "*.*.*", ">"):
            await worker.subscribe(f"{PREFIX}.{verb}.{forms}")
            await guarded.refuses("worker-other", "subscription")
    for subject in (
        f"{PREFIX}.card.demo.w-demo",
        f"{PREFIX}.events.demo.w-demo",
        f"{PREFIX}.events.demo.w-demo.seal",
        f"{PREFIX}.beat.demo.w-demo",
        f"{PREFIX}.worker.demo.w-demo.run",
    ):
        await worker.publish(subject, b"")
        await guarded.refuses("worker-other", subject)


async def test_a_worker_s_credentials_can_not_speak_for_a_worker_of_another_model(guarded: Guarded) -> None:
    """It tries everything its permissions allow: cards, events and snapshots that name the other model's worker."""
    acme = await guarded.connect("acme", "_INBOX_acme")
    await until_served(acme, "acme", 2)
    hostile = await guarded.connect("worker-other", "_INBOX_worker_other")
    asked = await listen(hostile, f"{PREFIX}.worker.other.w-demo.snapshot")
    live = await RawClient(acme).generate(ask(id="live", **LONG), subject=f"{PREFIX}.generate.demo.acme")
    await live.until(3)
    before = await card_of(acme, "demo")
    epoch = before["epoch"]
    later = f"{int(epoch.partition('-')[0]) + 1_000_000}-zz"
    said = {
        "worker_id": "w-demo",
        "load": {},
        "state": "stopped",
        "stream_nos": b"\0\0\0\0",
        "token_ids": b"\7\0\0\0",
        "finished": ["acme:live"],
    }
    for number in range(10):
        for model in ("other", "demo"):
            forged = msgspec.msgpack.encode(before | {"epoch": later, "model": model, "kv_block_size": None})
            await hostile.publish(f"{PREFIX}.card.other.w-demo", forged)
        for name, life in (("w-demo", epoch), ("w-demo", later), ("w-other", epoch)):
            events = msgspec.msgpack.encode(said | {"epoch": life, "seq": 1_000_000 + number})
            await hostile.publish(f"{PREFIX}.events.other.{name}", events)
    async with asyncio.timeout(10):
        while not asked:  # the router takes it for a worker of its own model, and is behind
            await asyncio.sleep(0.02)
    part = {
        "worker_id": "w-demo",
        "epoch": epoch,
        "seq": 0,
        "part": 0,
        "parts": 1,
        "runs": [],
        "running": [],
        "load": {},
    }
    for subject in (asked[0].reply, asked[0].reply.replace(".other.", ".demo."), asked[0].reply.rpartition(".")[0]):
        await hostile.publish(subject, msgspec.msgpack.encode(part))
    await hostile.flush()
    assert await card_of(acme, "demo") == before
    assert (await RawClient(acme).ask(ask(), subject=f"{PREFIX}.generate.demo.acme")).text == " 42"
    reply = await acme.request(f"{PREFIX}.cancel.acme.live", b"", timeout=5)
    assert json.loads(reply.data) == {"cancelled": True}
    assert (await live.terminal())["finish_reason"] == "cancelled"
    assert not [line for line in guarded.system.log("w-demo") if line["event"] in ("replaced", "self_fenced")]
    assert not [
        line for line in guarded.system.log("router") if line["event"] in ("worker_epoch_changed", "worker_lost")
    ]


async def test_whoever_has_no_or_wrong_credentials_is_told_so_and_shown_no_secret(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connection.BusSettings(url=guarded.system.url, connect_timeout_s=1)
    with pytest.raises(ConnectionError, match="refuses the credentials"):
        await connection.connect(settings, "nobody")
    wrong = Credentials(user="acme", password="guessed-wrong")
    settings = connection.BusSettings(url=guarded.system.url, connect_timeout_s=1, credentials=wrong)
    with pytest.raises(ConnectionError, match="refuses the credentials"):
        await connection.connect(settings, "acme")
    assert "guessed-wrong" not in repr(settings)
    with pytest.raises(ValueError, match="only one"):
        Credentials(user="a", token="t").check()
    text = guarded.system.text_log("router")
    assert not any(password in text for password in guarded.passwords.values())


@pytest.mark.parametrize(
    ("tenant", "inbox", "hint"), [("globex", "_INBOX_acme", "--tenant"), ("acme", "_INBOX", "--nats-inbox")]
)
async def test_who_asks_as_somebody_else_is_told_so_at_once(
    guarded: Guarded, tenant: str, inbox: str, hint: str
) -> None:
    await until_served(await guarded.connect("acme", "_INBOX_acme"), "acme", 1)
    who = Credentials(user="acme", password=guarded.passwords["acme"])
    settings = connection.BusSettings(url=guarded.system.url, inbox_prefix=inbox, credentials=who)
    async with await WireClient.connect(settings=settings, tenant=tenant) as client, asyncio.timeout(2):
        (end,) = [chunk async for chunk in client.generate("demo", prompt="12 + 30 =")]
        if tenant != "acme":
            with pytest.raises(errors.RequestError, match=f"permissions violation .*{hint}"):
                await client.models()
    assert "permissions violation" in end.error.message
    assert hint in end.error.message
