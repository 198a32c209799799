"""Requests overflow, with an adapter whose numbers are finite and large; nobody else's request is harmed."""

import asyncio
from pathlib import Path

import pytest

from tests.hostile import scale
from tests.support import poisoned_model
from tests.support.engines import exact_demo
from tests.support.exact_client import until_idle, until_ready
from tests.support.in_part import in_part
from tests.support.raw_client import Answer, Message, RawClient
from tests.support.system import System

LAYOUTS = {
    "unified": ("--flash-attention", "off"),
    "flash": ("--flash-attention", "on"),
    "quantized": ("--flash-attention", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
}
INEXACT = ("flash", "quantized")
"""Layouts in which numbers are rounded to 16 bits or fewer, differently in other company."""
STREAMS = 8
ATTACKS = 4


def innocent(number: int, max_tokens: int) -> Message:
    return {"prompt": f"{number} days ago the fox asked the owl about {number} + {number}", "max_tokens": max_tokens}


def attack(number: int) -> Message:
    return {"prompt": "Once upon a time " * (1 + number % 3), "max_tokens": 9, "lora": [{"name": "overflow"}]}


async def ask(client: RawClient, request: Message) -> Answer:
    return await client.generate(request | {"temperature": 0, "ignore_eos": True})


async def answers(client: RawClient, requests: list[Message]) -> list[str]:
    asked = [await ask(client, request) for request in requests]
    for one in asked:
        assert (await one.terminal())["finish_reason"] == "length"
    return [one.text for one in asked]


@pytest.mark.parametrize("layout", in_part(LAYOUTS, 2))
async def test_requests_that_overflow_end_alone_whoever_runs_beside_them_or_comes_later(
    system: System, tmp_path: Path, layout: str
) -> None:
    overflow = poisoned_model.write_overflowing(tmp_path / "overflow.gguf")
    system.router("r")
    flags = ("--max-num-seqs", "16", "--context-length", "512", *LAYOUTS[layout])
    system.worker("w", "--lora", f"overflow={overflow}", *flags, model=exact_demo().model)
    client = await system.connect()
    await until_ready(client, 1)
    requests = [innocent(number, 120) for number in range(STREAMS)]
    alone = [text for request in requests for text in await answers(client, [request])]
    running = [await ask(client, request) for request in requests]
    await asyncio.gather(*(one.until(2) for one in running))
    for number in range(ATTACKS):
        terminal = await (await ask(client, attack(number))).terminal()
        assert terminal["error"]["code"] == "internal"
    for one, text in zip(running, alone, strict=True):
        assert (await one.terminal())["finish_reason"] == "length"
        assert one.text == text or layout in INEXACT
    for turn in range(scale.times(3, 40)):
        later = [innocent(number, 30 + turn % 9) for number in range(STREAMS)]
        for text, whole in zip(await answers(client, later), alone, strict=True):
            assert whole.startswith(text) or layout in INEXACT
    await until_idle(client)
    seen = [line["logits"] for line in system.log("w") if line["event"] == "step_poisoned"]
    logits = [one for one in seen if isinstance(one, dict)]
    assert logits  # where only keys and values were looked at, there are none
    assert all(one["nan"] + one["pos_inf"] > 0 for one in logits)
