"""A client's requests, and those of other tenants over the same connection."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.support.raw_client import PREFIX, RawClient
from tests.support.wire_answers import answer_of
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

LOST = {"code": "worker_lost", "message": "it is gone", "retryable": True}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A broker where nobody serves anything."""
    nats = await nats_server.start(0, tmp_path / "nats.log")
    yield nats.url
    nats.stop()


@pytest.mark.parametrize("model", ["", "x" * 129])
async def test_a_model_that_can_be_no_name_is_refused_and_leaves_nothing_behind(url: str, model: str) -> None:
    async with await WireClient.connect(url) as client:
        with pytest.raises(ValueError, match="a name must have 1 to 128 bytes"):
            client.generate(model, prompt="hi")
        assert "0 streams" in repr(client)


async def test_the_tokens_of_a_router_that_can_not_continue_a_message_are_refused(url: str) -> None:
    router, continues = await RawClient.connect(url), list[bool]()

    async def serve(message: Msg) -> None:
        known = {"continues": True} if continues else {}
        await router.nats.publish(message.reply, json.dumps({"id": "t", "count": 3, **known}).encode())

    await router.nats.subscribe(f"{PREFIX}.tokenize.demo", cb=serve)
    await router.settle()
    said = [messages.ChatMessage(role="assistant", content="a")]
    asked = messages.TokenizeRequest(id="t", messages=said, continue_final_message=True)
    async with await WireClient.connect(url) as client:
        with pytest.raises(errors.RequestError, match="continue_final_message: the routers are of an earlier version"):
            await client.tokenize("demo", asked)
        continues.append(True)
        assert (await client.tokenize("demo", asked)).count == 3
    await router.close()


async def test_why_usage_is_not_saved_is_told_by_whichever_router_knows(url: str) -> None:
    router, problems = await RawClient.connect(url), list[str]()
    stats = dict.fromkeys(("decisions", "waiting", "indexed_blocks"), 0)
    stats |= dict.fromkeys(
        ("decisions_per_s", "decision_p50_us", "decision_p99_us", "predicted_hit_rate", "hit_rate"), 0
    )

    async def tell(message: Msg) -> None:
        for name, problem in zip(("one", "two"), problems, strict=False):
            told = {"router_id": name, "router": {"router_id": name, **stats, "usage_problem": problem}}
            await router.nats.publish(message.reply, json.dumps(told).encode())

    async with await WireClient.connect(url) as client:
        async with client.view_fleet() as viewer:
            assert await viewer.usage_problem(0.01) is None
        await router.nats.subscribe(f"{PREFIX}.fleet", cb=tell)
        await router.settle()
        problems += ["", "no room"]
        async with client.view_fleet() as viewer:
            assert await viewer.usage_problem(60) == "no room"
    await router.close()


async def test_a_lost_stream_goes_on_under_a_new_id_at_a_new_reply_subject(url: str) -> None:
    router, asked = await RawClient.connect(url), list[tuple[str, dict[str, Any]]]()
    cancelled = asyncio.Queue[str]()

    async def say(reply: str, **fields: object) -> None:
        await router.nats.publish(reply, json.dumps(fields).encode())

    async def serve(message: Msg) -> None:
        request, reply = json.loads(message.data), message.reply
        asked.append((reply, request))
        if len(asked) == 1:
            await say(reply, id="r", attempt=1, worker_id="w", hash_scheme="s")
            await say(reply, id="r", attempt=1, tokens=1, text="one ", token_ids=[1])
            await say(reply, id="r", attempt=1, finish_reason="error", worker_id=None, error=LOST)
            return
        # late chunks of the first worker must not disturb the second one's
        await say(asked[0][0], id="r", attempt=1, offset=1, tokens=1, text_offset=4, text="other ", token_ids=[9])
        await say(reply, id=request["id"], attempt=1, offset=1, text_offset=4, worker_id="v", hash_scheme="s")
        await say(reply, id=request["id"], attempt=1, offset=1, tokens=1, text_offset=4, text="text", token_ids=[2])
        await say(reply, id=request["id"], attempt=1, offset=2, text_offset=8, worker_id="v", finish_reason="stop")

    async def note(message: Msg) -> None:
        cancelled.put_nowait(message.subject)

    await router.nats.subscribe(f"{PREFIX}.generate.demo", cb=serve)
    await router.nats.subscribe(f"{PREFIX}.cancel.>", cb=note)
    await router.settle()
    async with asyncio.timeout(60), await WireClient.connect(url) as client:
        assert (await answer_of(client.generate("demo", prompt="hi", id="r"))).text == "one text"
        assert await cancelled.get() == f"{PREFIX}.cancel.default.r.demo"
        assert client.num_streams == 0
    (first, _), (second, again) = asked
    assert first != second
    assert again["resume_from"] == {"token_ids": [1], "hash_scheme": "s"}
    assert again["id"] != "r"
    await router.close()


async def test_another_tenant_speaks_over_the_same_connection_and_ends_with_it(url: str) -> None:
    heard = asyncio.Queue[str]()
    bare = await RawClient.connect(url)
    for tail in ("generate.demo", "generate.demo.acme", "cancel.default.*.demo", "cancel.acme.*.demo"):

        async def hear(message: object, tail: str = tail) -> None:
            heard.put_nowait(tail)

        await bare.nats.subscribe(f"{PREFIX}.{tail}", cb=hear)
    await bare.settle()
    async with asyncio.timeout(60):
        async with await WireClient.connect(url) as client:
            acme = await client.for_tenant("acme")
            client.generate("demo", prompt="hi")
            acme.generate("demo", prompt="hi")
            assert {await heard.get(), await heard.get()} == {"generate.demo", "generate.demo.acme"}
        assert {await heard.get(), await heard.get()} == {"cancel.default.*.demo", "cancel.acme.*.demo"}
    await bare.close()
