"""A request leaves numbers that are not finite where nothing overwrites them; no other request ends in an error."""

import asyncio

from tests.hostile import scale
from tests.support.exact_client import until_idle, until_ready
from tests.support.raw_client import Answer, Message, RawClient
from tests.support.system import System

STAIN = 127
WORKER = ("--engine", "sim", "--sim-speedup", "20", "--sim-faults", f"stain@{STAIN}", "--max-num-seqs", "16")
"""After a request with STAIN, the simulator has no finite numbers until its engine is replaced."""
STREAMS = 8
ATTACKS = 2


def innocent(number: int, max_tokens: int) -> Message:
    """Returns a request that an engine has to tokenize, since routers don't know the simulator's tokens."""
    prompt = f"{number} days ago the fox asked the owl about {number}"
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def texts(client: RawClient, requests: list[Message]) -> list[str]:
    answers = await asyncio.gather(*(client.generate(request) for request in requests))
    for one in answers:
        assert (await one.terminal())["finish_reason"] == "length"
    return [one.text for one in answers]


async def attack(client: RawClient) -> Answer:
    return await client.generate({"token_ids": [STAIN], "max_tokens": 9})


async def test_an_engine_whose_memory_stays_poisoned_is_replaced_and_all_others_get_their_answers(
    system: System,
) -> None:
    system.router("r")
    system.worker("w", *WORKER, model="dynamo")
    client = await system.connect()
    await until_ready(client, 1)
    requests = [innocent(number, 400) for number in range(STREAMS)]
    alone = await texts(client, requests)
    later = [innocent(number % STREAMS, 20 + number % 9) for number in range(scale.times(32, 160))]
    for _ in range(ATTACKS):
        running = [await client.generate(request) for request in requests]
        await asyncio.gather(*(one.until(2) for one in running))
        culprit = await attack(client)
        coming = asyncio.create_task(texts(client, later))
        terminal = await culprit.terminal()
        assert terminal["error"]["code"] == "request_crashes_engine"
        for one, text in zip(running, alone, strict=True):
            assert (await one.terminal())["finish_reason"] == "length"
            assert one.text == text
        for number, text in enumerate(await coming):
            assert alone[number % STREAMS].startswith(text)
    await until_idle(client)
