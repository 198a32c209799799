"""Large requests that are announced and not sent, or sent wrong, cost little and disturb nobody."""

import asyncio
import json
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.hostile.scale import times
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

MIB = 1 << 20
LARGE = "x" * (5 * MIB // 4)
SIM = ("--engine", "sim", "--sim-speedup", "1000", "--context-length", "1400000", "--kv-tokens", "1500000")


@pytest.fixture
async def enemy(system: System) -> RawClient:
    """A client of a system with one router, which has little memory for large requests."""
    system.router("router", "--tenant-upload-bytes", str(8 * MIB), "--max-request-bytes", str(4 * MIB))
    system.worker("worker", *SIM, model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 1)
    return bare


async def announce(bare: RawClient, size: object, tenant: str = "") -> dict[str, Any]:
    subject = f"{PREFIX}.generate.demo{tenant and '.'}{tenant}"
    return await ask(bare, subject, b"", {"Tokenbus-Size": str(size)})


async def ask(bare: RawClient, subject: str, part: bytes, headers: dict[str, str]) -> dict[str, Any]:
    return dict(json.loads((await bare.nats.request(subject, part, timeout=20, headers=headers)).data))


def at(offset: object) -> dict[str, str]:
    return {"Tokenbus-Offset": str(offset)}


def code(answer: dict[str, Any]) -> str:
    assert (answer["finish_reason"], answer["id"]) == ("error", "")
    return str(answer["error"]["code"])


async def works(client: WireClient) -> None:
    chunks = [chunk async for chunk in client.generate("demo", prompt=LARGE, max_tokens=1)]
    assert chunks[-1].usage, chunks
    assert chunks[-1].usage.prompt_tokens == len(LARGE)


async def test_a_tenant_uses_up_its_own_share_and_no_other_tenant_notices(system: System, enemy: RawClient) -> None:
    for _ in range(times(1, 20)):
        opened = [await announce(enemy, 2 * MIB) for _ in range(4)]
        refused = await announce(enemy, 1)
        assert code(refused) == "overloaded"
        assert refused["error"]["retryable"]
        assert refused["error"]["retry_after_ms"] > 0
        async with await WireClient.connect(system.url, tenant="other") as client:
            await works(client)
        for upload in opened:
            await enemy.nats.publish(upload["upload"], b"")
        async with await WireClient.connect(system.url) as client:
            await works(client)


@pytest.mark.long
async def test_sixty_four_small_announcements_are_all_that_a_tenant_may_make(system: System, enemy: RawClient) -> None:
    answers = [await announce(enemy, 1) for _ in range(times(100, 5_000))]
    assert ["upload" in one for one in answers] == [True] * 64 + [False] * (len(answers) - 64)
    assert {code(one) for one in answers[64:]} == {"overloaded"}
    async with await WireClient.connect(system.url, tenant="other") as client:
        await works(client)


async def test_a_size_that_can_not_be_is_refused(enemy: RawClient) -> None:
    for size in (0, -1, "many", "", "1" * 500, 10**13):
        assert code(await announce(enemy, size)) == "invalid_request", size
    for size in (4 * MIB + 1, 10**11):
        assert code(await announce(enemy, size)) == "payload_too_large", size


async def test_a_part_that_does_not_follow_is_refused(enemy: RawClient) -> None:
    wrong = [(0, 2_001, "invalid_request"), (999, 500, "invalid_request"), (1_001, 10, "upload_lost")]
    for offset, length, expected in [*wrong, ("x", 10, "invalid_request"), (1_000, 1_001, "invalid_request")]:
        upload = (await announce(enemy, 2_000))["upload"]
        assert (await ask(enemy, upload, bytes(1_000), at(0)))["received"] == 1_000
        assert (await ask(enemy, upload, bytes(1_000), at(0)))["received"] == 1_000  # once more, and counted once
        assert code(await ask(enemy, upload, bytes(length), at(offset))) == expected


async def test_parts_for_nobody_and_for_another_tenant_are_refused(enemy: RawClient) -> None:
    upload = str((await announce(enemy, 2_000, "acme"))["upload"])
    assert upload.startswith(f"{PREFIX}.upload.acme.")
    foreign = upload.replace(".acme.", ".globex.")
    guessed = upload[:-1] + ("0" if upload[-1] != "0" else "1")
    for subject in (foreign, guessed):
        assert code(await ask(enemy, subject, b"x", at(0))) == "upload_lost"
    assert (await ask(enemy, upload, b"x", at(0)))["received"] == 1
    router = (await ask(enemy, f"{PREFIX}.models", b"", {}))["router"]
    assert (router["uploads"], router["upload_bytes"]) == (1, 1)


async def test_a_late_part_of_a_complete_request_changes_nothing(enemy: RawClient) -> None:
    body = json.dumps({"prompt": "x" * 3_000, "max_tokens": 1, "id": "r"}).encode()
    upload = (await announce(enemy, len(body)))["upload"]
    first, rest = body[:1_000], body[1_000:]
    assert (await ask(enemy, upload, first, at(0)))["received"] == 1_000
    heard: list[Msg] = []
    inbox = enemy.nats.new_inbox()
    subscription = await enemy.nats.subscribe(inbox)
    await enemy.nats.publish(upload, rest, reply=inbox, headers=at(1_000))
    async with asyncio.timeout(60):
        while not heard or json.loads(heard[-1].data)["finish_reason"] is None:
            heard.append(await subscription.next_msg(timeout=60))
    assert json.loads(heard[-1].data)["usage"]["prompt_tokens"] == 3_000
    await enemy.nats.publish(upload, rest, reply=inbox, headers=at(1_000))
    await announce(enemy, 1)  # answered behind it
    assert not subscription.pending_msgs, "no second terminal"


async def test_a_body_that_is_no_request_is_refused_like_in_one_message(enemy: RawClient) -> None:
    for body in (b"{" * 5_000, bytes(5_000), b'{"prompt": 1' + b" " * 5_000 + b"}"):
        upload = (await announce(enemy, len(body)))["upload"]
        assert (await ask(enemy, upload, body[:2_000], at(0)))["received"] == 2_000
        refused = await ask(enemy, upload, body[2_000:], at(2_000))
        assert code(refused) == "invalid_request"


@pytest.mark.long
async def test_what_is_never_finished_is_forgotten_and_takes_no_memory(system: System, enemy: RawClient) -> None:
    before = system.memory_bytes("router")
    for _ in range(times(1, 5)):
        for _ in range(2):
            upload = (await announce(enemy, 4 * MIB))["upload"]
            for offset in range(0, 3 * MIB, MIB // 2):
                await ask(enemy, upload, bytes(MIB // 2), at(offset))
        assert code(await announce(enemy, 4 * MIB)) == "overloaded"
        await until_forgotten(enemy)
    logged = [line for line in system.log("router") if line["event"] == "upload_expired"]
    assert {(line["owner"], line["received"], line["size"]) for line in logged} == {("default", 3 * MIB, 4 * MIB)}
    async with await WireClient.connect(system.url) as client:
        await works(client)
    assert system.memory_bytes("router") - before < 60 * MIB


async def until_forgotten(enemy: RawClient) -> None:
    async with asyncio.timeout(60):
        while "error" in (answer := await announce(enemy, 4 * MIB)):
            assert code(answer) == "overloaded"
            await asyncio.sleep(0.2)
    await enemy.nats.publish(answer["upload"], b"")
