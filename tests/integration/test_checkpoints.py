"""Models whose state can't be cut at a token, served by whole workers: conversations come back to what they left."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import stateful
from tests.support.exact_client import until_idle, until_ready
from tests.support.in_part import in_part
from tests.support.raw_client import Answer, RawClient, check_stream
from tests.support.system import System

EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attention", "off", "--context-length", "1024")
SAMPLED = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    system.router("router")
    yield system
    await system.stop()


def tokens(seed: int, count: int) -> list[int]:
    return [10 + (seed * 37 + place * 11 + place * place) % 300 for place in range(count)]


def token_ids_of(stream: Answer) -> list[int]:
    return [token_id for message in stream.messages for token_id in message.get("token_ids") or []]


async def ask(
    bare: RawClient, token_ids: list[int], max_tokens: int, **fields: Any
) -> tuple[list[int], dict[str, Any]]:
    """Returns the tokens of an answer, and its terminal."""
    stream = await bare.generate(SAMPLED | {"token_ids": token_ids, "max_tokens": max_tokens} | fields)
    terminal = await stream.terminal()
    check_stream(stream)
    return token_ids_of(stream), terminal


@pytest.mark.parametrize("kind", in_part(["hybrid", "recurrent", "window"], 3))
async def test_a_conversation_goes_on_at_the_worker_and_token_where_it_ended(system: System, kind: str) -> None:
    for name in ("a", "b"):
        system.worker(name, *EXACT, model=stateful(kind).model)
    bare = await system.connect()
    assert all(card["kv_checkpoints"] and not card.get("kv_identity") for card in await until_ready(bare, 2))
    prompts = {seed: tokens(seed, 120) for seed in (1, 2, 3)}
    workers: dict[int, str] = {}
    for turn in range(4):
        for seed, prompt in prompts.items():
            answer, terminal = await ask(bare, prompt, 40)
            alone, _ = await ask(bare, prompt, 40, cache_prompt=False)
            assert answer == alone
            assert workers.setdefault(seed, terminal["worker_id"]) == terminal["worker_id"]
            assert terminal["usage"]["cached_tokens"] == (len(prompt) - 31 if turn else 0)
            prompts[seed] = prompt + answer + tokens(seed + turn, 30)
            await until_idle(bare)


async def test_a_stream_goes_on_exactly_in_the_next_engine(system: System) -> None:
    system.worker("a", *EXACT, model=stateful("hybrid").model)
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    expected, _ = await ask(bare, tokens(5, 200), 300, cache_prompt=False)
    stream = await bare.generate(SAMPLED | {"token_ids": tokens(5, 200), "max_tokens": 300})
    await stream.until(40)
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    await stream.terminal()
    check_stream(stream)
    assert token_ids_of(stream) == expected


async def test_without_room_for_a_checkpoint_a_model_is_served_without_reuse(system: System) -> None:
    system.worker("a", *EXACT, "--host-cache-mib", "0", model=stateful("hybrid").model)
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert (card.get("kv_checkpoints"), card.get("kv_block_size")) == (None, None)
    for _ in range(2):
        _, terminal = await ask(bare, tokens(7, 100), 20)
        assert terminal["usage"]["cached_tokens"] == 0
    (line,) = [line for line in system.log("a") if line.get("ability") == "prefix_cache"]
    assert line["event"] == "ability_missing"
    assert "--host-cache-mib leaves 0" in str(line["reason"])
