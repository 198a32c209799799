"""Agents' hints over NATS, seen by a client that only follows docs/wire.md: what is kept stays longer than the rest."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import stateful
from tests.support.exact_client import until_idle, until_ready
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System

SMALL = ("--engine", "sim", "--sim-speedup", "50", "--kv-tokens", "1024", "--context-length", "512")
"""A simulator with 64 blocks, and nothing in host memory."""
STATES = ("--context-length", "512", "--host-cache-mib", "1")


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[RawClient]:
    system = await System.start(tmp_path)
    system.router("router")
    system.worker("sim", *SMALL, "--host-cache-mib", "0", model="dynamo")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert "cache_control" in card["features"]
    yield bare
    await system.stop()


def tokens(seed: int, count: int = 160) -> list[int]:
    return [1 + (seed * 37 + place * 11) % 250 for place in range(count)]


async def cached(bare: RawClient, seed: int, **fields: Any) -> int:
    """Asks for one token after a prompt of ten blocks; returns how much of the prompt was cached."""
    answer = await bare.ask({"token_ids": tokens(seed), "max_tokens": 1, "temperature": 0} | fields)
    terminal = answer.terminals[0]
    assert "error" not in terminal, terminal
    await until_idle(bare)
    return int(terminal["usage"]["cached_tokens"])


async def flood(bare: RawClient, first: int, count: int = 8) -> None:
    """Computes other prompts, more than there is room for."""
    for seed in range(first, first + count):
        await cached(bare, seed)


async def hint(bare: RawClient, session_id: str, ttl_ms: float, tenant: str = "") -> dict[str, Any]:
    body = json.dumps({"id": "h", "session_id": session_id, "cache_control": {"ttl_ms": ttl_ms}}).encode()
    answer = await bare.nats.request(f"{PREFIX}.cache.demo{tenant}", body, timeout=10)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def test_a_prefix_stays_for_as_long_as_its_client_has_asked(bare: RawClient) -> None:
    await cached(bare, 1, cache_control={"ttl_ms": 600_000})
    await cached(bare, 2)
    await flood(bare, 10)
    assert await cached(bare, 2) < 159
    assert await cached(bare, 1) == 159


async def test_a_session_is_kept_on_and_ended_by_its_name_and_by_its_own_tenant_alone(bare: RawClient) -> None:
    told = {"id": "h", "model": "demo"}
    await cached(bare, 1, session_id="s")
    assert await hint(bare, "s", 600_000) == told
    assert await hint(bare, "unknown", 0) == told
    assert await hint(bare, "s", 0, tenant=".globex") == told
    await flood(bare, 10)
    assert await cached(bare, 1, session_id="s") == 159
    assert await hint(bare, "s", 0) == told
    await flood(bare, 30, count=4)
    assert await cached(bare, 1, session_id="s") == 0


async def test_a_request_may_be_the_last_of_its_session(bare: RawClient) -> None:
    await cached(bare, 1, session_id="s", cache_control={"ttl_ms": 600_000})
    await cached(bare, 1, session_id="s", cache_control={"ttl_ms": 0})
    await flood(bare, 10)
    assert await cached(bare, 1) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_warm_up_has_usage_and_no_tokens_and_saves_the_next_request_the_prompt(
    bare: RawClient, stream: bool
) -> None:
    answer = await bare.ask({"token_ids": tokens(1), "max_tokens": 0, "stream": stream})
    terminal = answer.terminals[0]
    assert (terminal["finish_reason"], terminal["tokens"], answer.text) == ("length", 0, "")
    assert terminal["usage"] == {
        "prompt_tokens": 160,
        "completion_tokens": 0,
        "total_tokens": 160,
        "cached_tokens": 0,
    }
    assert await cached(bare, 1) == 159


async def test_hints_that_can_not_be_read_name_the_field(bare: RawClient) -> None:
    for body, param in (
        (b'{"cache_control": {}}', "session_id"),
        (b'{"session_id": "s"}', "cache_control"),
        (b'{"session_id": "s", "cache_control": {"ttl_ms": -1}}', "cache_control.ttl_ms"),
        (b'{"session_id": "s", "cache_control": {"ttl_ms": 1e9}}', "cache_control.ttl_ms"),
        (b'{"session_id": "%s", "cache_control": {}}' % (b"x" * 257), "session_id"),
        (b'{"session_id": 5, "cache_control": {}}', "session_id"),
    ):
        reply = json.loads((await bare.nats.request(f"{PREFIX}.cache.demo", body, timeout=10)).data)
        assert (reply["error"]["code"], reply["error"]["param"]) == ("invalid_request", param), reply
    refused = await bare.ask({"token_ids": [1], "cache_control": {"ttl_ms": -1}})
    assert refused.terminals[0]["error"]["param"] == "cache_control.ttl_ms"


async def test_the_states_of_a_hybrid_models_conversation_are_kept_too(tmp_path: Path) -> None:
    system = await System.start(tmp_path)
    try:
        system.router("router")
        system.worker("a", *STATES, model=stateful("hybrid").model)
        bare = await system.connect()
        await until_ready(bare, 1)
        await cached(bare, 1, session_id="s", cache_control={"ttl_ms": 600_000})
        await cached(bare, 2)
        await flood(bare, 10, count=40)
        assert await cached(bare, 2) == 0
        assert await cached(bare, 1) > 100
        await hint(bare, "s", 0)
        await flood(bare, 60, count=3)
    finally:
        await system.stop()
