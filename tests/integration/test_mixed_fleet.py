"""Workers with different engines behind one router answer correctly under load."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import cards, until_idle, until_ready
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System
from tokenbus import demo
from tools.demo_model import corpus

SAME_WEIGHTS = ("--fingerprint", "demo-1")
PREAMBLE = "You are friendly and you know the world well. " * 12


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def asked(question: str, *, told: bool) -> dict[str, Any]:
    before = [{"role": "system", "content": PREAMBLE}] if told else []
    return {"messages": [*before, {"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}


async def answers(bare: RawClient, pairs: list[tuple[str, str]], *, told: bool) -> list[tuple[str, dict[str, Any]]]:
    """Sends requests and checks their answers; returns the workers and terminals."""
    streams = [await bare.generate(asked(question, told=told)) for question, _ in pairs]
    found = []
    for stream, (question, truth) in zip(streams, pairs, strict=True):
        terminal = await stream.terminal(60)
        check_stream(stream)
        assert told or stream.text == truth, (question, stream.text, terminal)
        found.append((stream.text, terminal))
    return found


async def test_two_engines_serve_one_model_beside_a_simulator_of_another(system: System) -> None:
    system.router("router")
    system.worker("gguf-1", *SAME_WEIGHTS)
    system.worker("gguf-2", *SAME_WEIGHTS)
    system.worker("onnx", *SAME_WEIGHTS, "--kv-block-size", "16", model=demo.ONNX_PATH)
    system.worker("sim", "--engine", "sim", "--sim-speedup", "20", model="dynamo", served_name="other")
    bare = await system.connect()
    engines = {card["worker_id"]: card["engine"] for card in await until_ready(bare, 4)}
    assert engines == {"gguf-1": "gguf", "gguf-2": "gguf", "onnx": "onnx", "sim": "sim"}
    facts = [fact for country in corpus.COUNTRIES for fact in corpus.facts(country)]
    pairs = list(itertools.islice(itertools.cycle(facts), 60))

    async def other() -> None:
        for _ in range(10):
            stream = await bare.ask({"prompt": "x", "max_tokens": 20}, subject=f"{PREFIX}.generate.other")
            assert stream.text.startswith(" simulated-")
            assert stream.terminals[0]["worker_id"] == "sim"

    found, _ = await asyncio.gather(answers(bare, pairs, told=False), other())
    served = Counter(terminal["worker_id"] for _, terminal in found)
    assert set(served) == {"gguf-1", "gguf-2", "onnx"}, served

    by_engine = {}
    for worker_id in ("gguf-1", "onnx"):
        pinned = [
            await bare.ask(asked(question, told=True) | {"routing": {"worker_id": worker_id}})
            for question, _ in facts[:8]
        ]
        by_engine[worker_id] = [stream.text for stream in pinned]
        cached = [stream.messages[-1]["usage"]["cached_tokens"] for stream in pinned]
        assert all(count > 100 for count in cached[1:]), (worker_id, cached)
    assert by_engine["gguf-1"] == by_engine["onnx"]
    await until_idle(bare)
    assert all(card["load"]["used_blocks"] == 0 for card in await cards(bare))


async def test_other_weights_under_the_same_name_are_refused_and_shown(system: System) -> None:
    system.router("router")
    system.worker("gguf")
    bare = await system.connect()
    await until_ready(bare, 1)
    system.worker("onnx", model=demo.ONNX_PATH)
    await system.until_logged("router", "card_refused")
    assert [card["worker_id"] for card in await cards(bare)] == ["gguf"]
