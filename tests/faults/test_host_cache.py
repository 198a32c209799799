"""Copies of computed blocks outlive their engine and, with a file, the whole worker."""

import os
import signal
from pathlib import Path

from tests.support.exact_client import until_ready
from tests.support.system import System

STORY = {"prompt": "Once upon a time there was a little fox who lived by the river. " * 6, "max_tokens": 8}
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
    file = tmp_path / "cache"
    settings = ("--host-cache-file", str(file), "--host-cache-mib", "16")
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


async def test_a_worker_whose_cache_file_can_not_be_trusted_says_so_and_ends(system: System, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    file.chmod(0o644)
    system.router("router")
    system.worker("worker", "--host-cache-file", str(file))
    assert await system.wait("worker") == 2
    assert "has mode 0644; others must have no access: chmod 600" in system.text_log("worker")
