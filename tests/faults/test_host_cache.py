"""Copies of computed blocks outlive their engine and, with a file, the whole worker."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.engines import stateful
from tests.support.exact_client import until_idle, until_ready
from tests.support.in_part import in_part
from tests.support.system import System

STORY = {"prompt": "Once upon a time there was a little fox who lived by the river. " * 6, "max_tokens": 8}
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attention", "off", "--context-length", "1024")
GREEDY = {"temperature": 0, "ignore_eos": True}


def events(system: System, name: str) -> list[dict[str, object]]:
    return [line for line in system.log("worker") if line["event"] == name]


async def test_a_known_prompt_computes_less_than_a_block_after_the_engine_is_killed_with_9(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    before = await bare.ask(STORY | GREEDY)
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    await system.until_logged("worker", "host_cache_recovered")
    await until_ready(bare, 1)
    after = await bare.ask(STORY | GREEDY)
    assert after.text == before.text
    usage = after.terminals[0]["usage"]
    assert usage["prompt_tokens"] - usage["cached_tokens"] <= 16
    (recovered,) = events(system, "host_cache_recovered")
    assert recovered["discarded"] == {}


async def test_a_known_prompt_computes_less_than_a_block_after_the_worker_is_killed_with_9(
    system: System, tmp_path: Path
) -> None:
    settings = ("--keep-cache", str(tmp_path / "cache"), "--host-cache-mib", "16")
    system.router("router")
    system.worker("worker", *settings)
    bare = await system.connect()
    await until_ready(bare, 1)
    before = await bare.ask(STORY | GREEDY)
    system.kill("worker")
    system.worker("worker", *settings)
    await system.until_logged("worker", "host_cache_recovered")
    await until_ready(bare, 1)
    after = await bare.ask(STORY | GREEDY)
    assert after.text == before.text
    usage = after.terminals[0]["usage"]
    assert usage["prompt_tokens"] - usage["cached_tokens"] <= 16


@pytest.mark.parametrize("kind", in_part(["hybrid", "window"], 2))
async def test_a_conversation_goes_on_where_it_was_after_its_worker_has_left_or_was_killed_with_9(
    system: System, tmp_path: Path, kind: str
) -> None:
    settings = (*EXACT, "--keep-cache", str(tmp_path / "cache"), "--host-cache-mib", "16", "--grace-s", "5")
    model = stateful(kind).model
    system.router("router")
    system.worker("worker", *settings, model=model)
    bare = await system.connect()
    await until_ready(bare, 1)
    prompt, last, starts = list(range(10, 130)), 0, 0
    for stop in ("", "leave", "kill"):
        if stop:
            await until_idle(bare)
            await asyncio.sleep(0.3)  # an idle engine copies what is left
            if stop == "kill":
                system.kill("worker")
            else:
                system.signal("worker", signal.SIGTERM)
                await system.wait("worker")
            starts += 1
            system.worker("worker", *settings, model=model)
            while len(events(system, "host_cache_recovered")) < starts:
                await asyncio.sleep(0.1)
            await until_ready(bare, 1)
        asked = GREEDY | {"token_ids": prompt, "max_tokens": 40, "return_token_ids": True}
        answer = await bare.ask(asked)
        again = await bare.ask(asked | {"cache_prompt": False})
        assert answer.text == again.text
        assert answer.terminals[0]["usage"]["cached_tokens"] == last
        tokens = [token for message in answer.messages for token in message.get("token_ids") or ()]
        last = len(prompt) + len(tokens) - 1
        prompt += [*tokens, *range(40, 70)]


async def test_a_folder_that_can_not_be_trusted_is_not_used_and_the_worker_serves(
    system: System, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    system.router("router")
    system.worker("worker", "--keep-cache", str(folder))
    bare = await system.connect()
    await until_ready(bare, 1)
    (line,) = events(system, "cache_not_kept")
    assert line["reason"] == "has mode 0777: others may write there; chmod 700"
    assert not list(folder.iterdir())
