"""Models in one worker process share a KV budget: an idle one's memory serves the busy one until it is asked."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_replicas import control
from tests.support.exact_client import cards, until_idle, until_ready
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System
from tokenbus import demo

MIB = 1 << 20
POOL = ("--context-length", "512", "--kv-budget", "16", "--host-cache-mib", "64")
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


async def two_models(system: System, *more: str, count: int = 2) -> tuple[RawClient, dict[str, dict[str, Any]]]:
    """Starts models `busy` and `other`, whose lanes take 2 of 16 MiB each, and those of further flags; returns a client
    and their cards."""
    system.router("router")
    other = ("--model", str(demo.ONNX_PATH), "--served-name", "other")
    system.worker("worker", *other, *POOL, *more, model=demo.ONNX_PATH, served_name="busy")
    bare = await system.connect()
    return bare, {card["model"]: card for card in await until_ready(bare, count)}


async def loads(bare: RawClient) -> dict[str, dict[str, Any]]:
    return {card["model"]: card["load"] for card in await cards(bare)}


async def until(bare: RawClient, model: str, **fields: int) -> None:
    """Waits until a model's load has these fields."""
    async with asyncio.timeout(60):
        while not fields.items() <= (await loads(bare))[model].items():
            await asyncio.sleep(0.02)


async def test_a_busy_model_uses_an_idle_ones_memory_and_gives_it_back_when_that_is_asked(system: System) -> None:
    bare, found = await two_models(system)
    assert [found[model]["max_num_seqs"] for model in ("busy", "other")] == [8, 8], "all of the budget, and not half"
    running = [await bare.generate(LONG, subject=f"{PREFIX}.generate.busy") for _ in range(8)]
    await until(bare, "busy", running=8, kv_pool_bytes=16 * MIB)
    assert (await loads(bare))["other"].get("kv_pool_bytes", 0) == 0
    answer = await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3}, subject=f"{PREFIX}.generate.other")
    assert answer.text == " 42"
    for one in running:
        assert (await one.terminal(timeout_s=60))["usage"]["completion_tokens"] == 400
        check_stream(one)
    assert len({one.text for one in running}) == 1, "a preempted stream goes on as if nothing had been"
    await until_idle(bare)
    preempted = [line for line in system.log("worker") if line["event"] == "sequence_preempted"]
    assert len(preempted) >= 1
    reclaimed = [line for line in system.log("worker") if line["event"] == "kv_reclaimed"]
    assert sum(line.get("preempted_bytes", 0) for line in reclaimed) == len(preempted) * 2 * MIB


@pytest.mark.long
async def test_all_models_go_on_when_their_engine_is_killed_while_one_has_borrowed(system: System) -> None:
    bare, found = await two_models(system, "--model", str(demo.MODEL_PATH), "--served-name", "fixed", count=3)
    running = [await bare.generate(LONG, subject=f"{PREFIX}.generate.busy") for _ in range(5)]
    await until(bare, "busy", running=5)
    running += [await bare.generate(LONG, subject=f"{PREFIX}.generate.{model}") for model in ("other", "fixed")]
    await running[-2].until(2)
    os.kill(found["busy"]["pids"]["engine"], signal.SIGKILL)
    for one in running:
        assert (await one.terminal(timeout_s=90))["usage"]["completion_tokens"] == 400
        check_stream(one)
    await until_idle(bare)
    blocks = {model: card["total_kv_blocks"] for model, card in found.items()}
    assert {card["model"]: card["total_kv_blocks"] for card in await until_ready(bare, 3)} == blocks


@pytest.mark.long
async def test_a_late_model_is_fitted_beside_busy_ones_or_refused_with_what_they_keep(
    system: System, tmp_path: Path
) -> None:
    late = tmp_path / "late.gguf"
    shutil.copyfile(demo.MODEL_PATH, late)
    bare, found = await two_models(system)
    running = [await bare.generate(LONG, subject=f"{PREFIX}.generate.busy") for _ in range(8)]
    await until(bare, "busy", running=8)
    card = found["busy"]
    too_large = {"model": str(demo.ONNX_PATH), "served_name": "large", "settings": {"context_length": 2_048}}
    for number in (1, 2):
        fixed = {"model": str(late), "served_name": f"fixed-{number}", "settings": {"context_length": 512}}
        told = await control(bare, card, op="load", **fixed)
        assert told[-1]["ok"], told
    told = await control(bare, card, op="load", **too_large, replicas=2)
    assert not told[-1]["ok"]
    assert "--kv-budget" in told[-1]["error"]["message"], told
    third = {"model": str(demo.ONNX_PATH), "served_name": "third"}
    assert (await control(bare, card, op="load", **third))[-1]["ok"]
    for model in ("third", "fixed-1", "other"):
        answer = await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3}, subject=f"{PREFIX}.generate.{model}")
        assert answer.text == " 42"
    for one in running:
        assert (await one.terminal(timeout_s=60))["usage"]["completion_tokens"] == 400
        check_stream(one)


async def test_a_budget_without_a_lane_for_each_model_stops_the_worker_in_one_line(system: System) -> None:
    other = ("--model", str(demo.ONNX_PATH), "--served-name", "other")
    arguments = (*POOL, "--kv-budget", "3")
    system.worker("worker", *other, *arguments, model=demo.ONNX_PATH, served_name="busy")
    assert await system.wait("worker") == 2
    last = system.text_log("worker").splitlines()[-1]
    assert last.startswith("tokenbus: --kv-budget leaves 1048576 of 3145728 bytes for demo-onnx, which needs 2097152")
    assert "the others keep at least: demo-onnx 2097152" in last
