"""The sums of usage are those of all answers, whatever dies in between."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.exact_client import until_ready
from tests.support.system import System, command
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

SIM = ("--engine", "sim", "--sim-speedup", "20")


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    config = tmp_path / "nats.conf"
    config.write_text(f"jetstream {{ store_dir: '{tmp_path / 'jetstream'}' }}\n")
    system = await System.start(tmp_path, config)
    yield system
    await system.stop()


async def answer(client: WireClient, number: int) -> messages.Usage:
    """Returns the usage of one request's answer."""
    sizes = {"token_ids": list(range(2 + number % 40)), "max_tokens": 1 + number % 60}
    async for chunk in client.generate("demo", ignore_eos=True, **sizes):
        if chunk.finish_reason is not None:
            assert not chunk.error, chunk
            assert chunk.usage
            return chunk.usage
    raise AssertionError("no terminal")


async def in_table(url: str) -> tuple[int, int, int]:
    """Returns what `tokenbus usage` shows: requests, and tokens of prompts and completions."""
    process = await asyncio.create_subprocess_exec(
        *command("usage", "--nats", url, "--json"), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    total = json.loads(printed or b'{"total": {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}}')["total"]
    return total["requests"], total["prompt_tokens"], total["completion_tokens"]


async def until_in_table(url: str, answers: list[messages.Usage]) -> None:
    expected = (
        len(answers),
        sum(one.prompt_tokens for one in answers),
        sum(one.completion_tokens for one in answers),
    )
    found = None
    try:
        async with asyncio.timeout(20):
            while (found := await in_table(url)) != expected:
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"{found} are in the table, and {expected} were answered")


async def test_the_table_equals_the_answers_after_a_router_was_killed_one_stopped_under_load_and_the_broker_restarted(
    system: System,
) -> None:
    names = ["router-a", "router-b", "router-c"]
    for name in names:
        system.router(name, "--usage")
    for name in ("worker-a", "worker-b"):
        system.worker(name, *SIM, "--max-waiting", "256", model="dynamo")
    bare = await system.connect()
    await until_ready(bare, 2)
    for name in names:
        await system.until_logged(name, "router_ready")
    rng = random.Random(5)
    async with await WireClient.connect(system.url) as client:
        answers = list(await asyncio.gather(*(answer(client, rng.randrange(1_000)) for _ in range(60))))
        await until_in_table(system.url, answers)  # all is saved, and nothing is open: nothing can be lost
        system.signal("router-a", signal.SIGKILL)
        answers += await asyncio.gather(*(answer(client, rng.randrange(1_000)) for _ in range(60)))
        await until_in_table(system.url, answers)
        asked = [asyncio.ensure_future(answer(client, 1_000 + rng.randrange(1_000))) for _ in range(60)]
        await asyncio.sleep(0.2)
        system.signal("router-b", signal.SIGTERM)  # hands its streams over, and saves what it has counted
        answers += await asyncio.gather(*asked)
        assert await system.wait("router-b") == 0
        await until_in_table(system.url, answers)
        await system.restart_broker()
        answers += await asyncio.gather(*(answer(client, rng.randrange(1_000)) for _ in range(60)))
        await until_in_table(system.url, answers)
