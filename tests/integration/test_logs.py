"""Log lines of real processes about requests, long waits and operators."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.exact_client import until_ready
from tests.support.system import System
from tests.support.wire_answers import answer_of
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import subjects

PROMPT = "Once upon a time there was an unmistakable prompt"


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def lines(system: System, name: str, event: str) -> list[dict[str, Any]]:
    return [line for line in system.log(name) if line["event"] == event]


async def test_a_request_that_waits_long_leaves_lines_where_it_waits(system: System) -> None:
    system.router("router", "--slow-wait-s", "0.2")
    system.worker("w1", "--max-num-seqs", "1", "--slow-wait-s", "0.2", "--engine", "sim", model="steps-of-50ms")
    await until_ready(await system.connect(), 1)
    async with await WireClient.connect(system.url) as client:
        blocking = client.generate("demo", token_ids=[1], max_tokens=1_000, ignore_eos=True, id="blocking")
        await anext(blocking)
        pinned = client.generate("demo", token_ids=[2], max_tokens=1, id="pinned", routing={"worker_id": "w1"})
        waiting = client.generate("demo", token_ids=[3], max_tokens=1, id="waiting")
        said: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(60):
            while said.keys() < {"default:pinned", "default:waiting"}:
                found = lines(system, "router", "request_waiting") + lines(system, "w1", "request_waiting")
                said = {line["request_id"]: line for line in found if line["request_id"] != "default:blocking"}
                await asyncio.sleep(0.02)
        blocking.cancel()
        for stream in (pinned, waiting):
            assert (await answer_of(stream)).text
    for line in said.values():
        assert line["waits_for"] in ("place", "first_token")
        assert line["waited_s"] >= 0.2


@pytest.mark.parametrize(("flags", "shown"), [((), None), (("--log-prompt-chars", "9"), PROMPT[:9])])
async def test_a_prompt_is_logged_only_where_that_is_asked_for(
    system: System, flags: tuple[str, ...], shown: str | None
) -> None:
    system.router("router", *flags)
    system.worker("w1")
    await until_ready(await system.connect(), 1)
    async with await WireClient.connect(system.url) as client:
        for asked in ({"prompt": PROMPT}, {"messages": [{"role": "user", "content": PROMPT}]}):
            text = (await answer_of(client.generate("demo", max_tokens=20, ignore_eos=True, **asked))).text
            assert len(text) > 20
            assert text not in system.text_log("router") + system.text_log("w1")
    assert "unmistakable" not in system.text_log("router") + system.text_log("w1")
    prompts = [line["prompt"] for line in lines(system, "router", "request_prompt")]
    assert prompts == ([shown, shown] if shown else [])


async def test_what_an_operator_asks_for_is_logged_with_what_came_of_it(system: System) -> None:
    system.router("router")
    system.worker("w1")
    bare = await system.connect()
    await until_ready(bare, 1)
    subject = subjects.Subjects().worker("demo", "w1", "control")
    for control in (
        {"op": "clear_cache"},
        {"op": "explode"},
        {"op": "load", "model": "m", "replicas": 0},
        {"op": "drain"},
    ):
        await bare.nats.request(subject, msgspec.msgpack.encode(control), timeout=60)
    await system.until_logged("w1", "drained")
    assert [(line["op"], line["ok"], line["inbox"]) for line in lines(system, "w1", "control")] == [
        ("clear_cache", True, "_INBOX"),
        (None, False, "_INBOX"),
        ("load", False, "_INBOX"),
        ("drain", True, "_INBOX"),
    ]
