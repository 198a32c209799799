"""Models that are loaded when they are asked for, seen by a client that only follows docs/wire.md."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.errors import NoRespondersError

from tests.support.raw_client import PREFIX, Answer, RawClient, check_stream
from tests.support.system import System
from tokenbus import demo
from tokenbus.client.wire.wire_client import WireClient

SIM = "steps-of-50ms"
SIM_MIB = 96
"""The memory that a simulated model is expected to take."""
Message = dict[str, Any]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def models(*names: str, model: str | Path = SIM, engine: str = "sim") -> list[str]:
    """Returns the flags of further models."""
    flags = [flag for name in names[1:] for flag in ("--model", str(model), "--served-name", name)]
    return [*flags, "--engine", engine]


def sim_worker(system: System, *names: str, room: int, worker: str = "worker", arguments: tuple[str, ...] = ()) -> None:
    """Starts a worker of simulated models, of which so many have room at the same time."""
    budget = ("--memory-budget-mib", str(room * SIM_MIB + SIM_MIB // 2), "--sim-speedup", "20")
    system.worker(worker, *models(*names), *budget, *arguments, model=SIM, served_name=names[0])


async def listed(bare: RawClient, *names: str) -> dict[str, Message]:
    """Waits until all models are listed; returns them by name."""
    found: dict[str, Message] | None = None
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(NoRespondersError):
                reply = json.loads((await bare.nats.request(f"{PREFIX}.models", b"", timeout=5)).data)
                found = {served["model"]: served for served in reply["models"]}
            if found is not None and found.keys() >= set(names):
                return found
            await asyncio.sleep(0.05)


async def ask(bare: RawClient, model: str, **fields: Any) -> Answer:
    request = {"prompt": "Once upon a time", "max_tokens": 4} | fields
    return await bare.generate(request, subject=f"{PREFIX}.generate.{model}")


async def speaks(answer: Answer) -> None:
    """Waits for the first token."""
    async with asyncio.timeout(60):
        while not answer.num_tokens:
            await answer.until(len(answer.messages) + 1)


async def complete(bare: RawClient, model: str, **fields: Any) -> Message:
    """Returns the terminal of a request, which may take a while."""
    answer = await ask(bare, model, **fields)
    return await answer.terminal()


def events(system: System, *names: str, worker: str = "worker") -> list[tuple[Any, Any]]:
    return [(line["event"], line.get("model")) for line in system.log(worker) if line["event"] in names]


async def test_two_models_with_room_for_one_both_answer_in_turn(system: System) -> None:
    system.router("router")
    sim_worker(system, "a", "b", room=1)
    bare = await system.connect()
    found = await listed(bare, "a", "b")
    assert [found[name]["loadable"] for name in ("a", "b")] == [True, True]
    for name in ("a", "b", "a"):
        assert (await complete(bare, name))["finish_reason"] == "length"
        found = await listed(bare, "a", "b")
        assert "loadable" not in found[name]
        assert "generate" in found[name]["features"]
    assert events(system, "model_loaded", "model_unloaded") == [
        ("model_loaded", "a"),
        ("model_unloaded", "a"),
        ("model_loaded", "b"),
        ("model_unloaded", "b"),
        ("model_loaded", "a"),
    ]


async def test_a_model_is_loaded_once_for_requests_that_come_together_to_two_routers(system: System) -> None:
    system.router("one")
    system.router("two")
    sim_worker(system, "a", room=1, worker="w1")
    sim_worker(system, "a", room=1, worker="w2")
    bare = await system.connect()
    await listed(bare, "a")
    async with asyncio.timeout(30):  # both routers know both workers
        while any(line_count(system, router) < 2 for router in ("one", "two")):
            await asyncio.sleep(0.05)
    answers = [await ask(bare, "a") for _ in range(12)]
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "length"
        check_stream(answer)
    loaded = [event for worker in ("w1", "w2") for event in events(system, "model_loaded", worker=worker)]
    assert loaded == [("model_loaded", "a")]


def line_count(system: System, router: str) -> int:
    return sum(line["event"] == "worker_state_changed" for line in system.log(router))


async def test_what_an_operator_has_not_listed_is_not_loaded(system: System) -> None:
    system.router("router")
    sim_worker(system, "a", room=1)
    bare = await system.connect()
    await listed(bare, "a")
    terminal = await complete(bare, SIM)
    assert terminal["error"]["code"] in ("no_worker", "model_not_found")
    assert events(system, "model_loaded") == []


async def test_a_request_that_names_no_model_loads_the_only_one(system: System) -> None:
    system.router("router")
    sim_worker(system, "a", room=1)
    await listed(await system.connect(), "a")
    async with await WireClient.connect(system.url) as client:
        terminal = [chunk async for chunk in client.generate(None, prompt="Once upon a time", max_tokens=4)][-1]
    assert terminal.finish_reason == "length"
    assert events(system, "model_loaded") == [("model_loaded", "a")]


async def test_ten_models_asked_at_random_with_room_for_three_lose_no_request(system: System) -> None:
    names = [f"m{number}" for number in range(10)]
    system.router("router")
    sim_worker(system, *names, room=3)
    bare = await system.connect()
    await listed(bare, *names)
    rng = random.Random(7)
    answers = []
    for _ in range(30):
        answers.append(await ask(bare, rng.choice(names), max_tokens=rng.randint(1, 40), timeout_ms=300_000))
        await asyncio.sleep(rng.random() / 10)
    for answer in answers:
        assert (await answer.terminal(300.0))["finish_reason"] == "length"
        check_stream(answer)
    loaded: set[Any] = set()
    for event, model in events(system, "model_loading", "model_loaded", "model_unloaded"):
        if event == "model_loaded":
            assert model not in loaded
            loaded.add(model)
        elif event == "model_unloaded":
            loaded.remove(model)
        assert len(loaded) <= 3


async def test_a_client_hears_how_far_the_load_is_and_its_timeout_ends_the_wait(system: System) -> None:
    system.router("router")
    sim_worker(system, "busy", "other", room=1)
    bare = await system.connect()
    await listed(bare, "busy", "other")
    long = await ask(bare, "busy", max_tokens=20_000)
    await speaks(long)
    began = time.monotonic()
    answer = await ask(bare, "other", timeout_ms=2_500)
    terminal = await answer.terminal()
    assert terminal["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - began > 2.4
    assert [chunk["load_progress"] for chunk in answer.messages[:-1]] == [0.0] * (len(answer.messages) - 1)
    assert len(answer.messages) >= 2
    check_stream(answer)
    assert not long.terminals


@pytest.mark.long
async def test_a_busy_model_finishes_its_requests_before_it_makes_room(system: System) -> None:
    system.router("router")
    sim_worker(system, "busy", "other", room=1)
    bare = await system.connect()
    await listed(bare, "busy", "other")
    long = await ask(bare, "busy", max_tokens=3_000)
    await speaks(long)
    assert (await complete(bare, "other"))["finish_reason"] == "length"
    assert long.terminals[0]["finish_reason"] == "length"
    assert long.num_tokens == 3_000


async def test_a_model_that_is_idle_for_long_is_unloaded_and_a_pinned_one_is_not(system: System) -> None:
    system.router("router")
    arguments = ("--idle-unload-s", "0.5", "--pin", "pinned")
    system.worker("worker", *models("idle", "pinned"), *arguments, model=SIM, served_name="idle")
    bare = await system.connect()
    found = await listed(bare, "idle", "pinned")
    assert "loadable" not in found["pinned"]
    assert (await complete(bare, "idle"))["finish_reason"] == "length"
    await system.until_logged("worker", "model_unloaded")
    assert events(system, "model_unloaded") == [("model_unloaded", "idle")]
    assert (await complete(bare, "pinned"))["finish_reason"] == "length"


async def test_a_load_that_fails_ends_its_requests_with_the_reason(system: System, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo.MODEL_PATH.read_bytes()[:900_000])
    system.router("router")
    arguments = models("good", "broken", model=broken, engine="auto")
    system.worker("worker", *arguments, "--memory-budget-mib", "200", served_name="good")
    bare = await system.connect()
    await listed(bare, "good", "broken")
    answers = [await ask(bare, "broken") for _ in range(3)]
    for answer in answers:
        error = (await answer.terminal())["error"]
        assert error["code"] == "no_worker"
        assert "the model broken can't be loaded" in error["message"]
        assert error["retry_after_ms"] > 0
    assert len(events(system, "model_not_loaded")) == 1
    assert (await complete(bare, "good"))["finish_reason"] == "length"


async def test_a_model_that_was_removed_while_it_was_loaded_goes_on_and_then_says_that_it_is_gone(
    system: System, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(demo.MODEL_PATH.read_bytes())
    system.router("router")
    arguments = models("other", "model", model=path, engine="auto")
    system.worker("worker", *arguments, "--memory-budget-mib", "200", served_name="other")
    bare = await system.connect()
    await listed(bare, "other", "model")
    assert (await complete(bare, "model"))["finish_reason"] == "length"
    path.unlink()
    assert (await complete(bare, "model"))["finish_reason"] == "length"
    assert (await complete(bare, "other"))["finish_reason"] == "length"
    error = (await complete(bare, "model"))["error"]
    assert "there is no such file" in error["message"]
    assert (await complete(bare, "other"))["finish_reason"] == "length"


def engines(system: System) -> set[int]:
    """Returns the engine processes of the worker."""
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in system.family("worker")}
    return {pid for pid, path in commands.items() if path.exists() and b"engine.process.main" in path.read_bytes()}


async def test_an_engine_that_is_killed_while_it_loads_is_started_again_and_others_stream_on(system: System) -> None:
    system.router("router")
    arguments = models("a", "b", model=demo.MODEL_PATH, engine="auto")
    system.worker("worker", *arguments, "--memory-budget-mib", "350", served_name="a")
    bare = await system.connect()
    await listed(bare, "a", "b")
    long = await ask(bare, "a", max_tokens=400, stop_token_ids=[])
    await speaks(long)
    before = engines(system)
    answer = await ask(bare, "b")
    async with asyncio.timeout(10):
        while not (new := engines(system) - before):
            await asyncio.sleep(0.005)
    os.kill(new.pop(), signal.SIGKILL)
    assert (await answer.terminal())["finish_reason"] == "length"
    assert (await long.terminal())["finish_reason"] in ("length", "stop")
    assert [line["event"] for line in system.log("worker")].count("engine_died") == 1


async def test_a_router_holds_requests_until_there_is_a_worker(system: System) -> None:
    system.router("router", "--hold-s", "30", "--expect-model", "a")
    bare = await system.connect()
    await listed(bare)
    answer = await ask(bare, "a")
    await answer.until(1)
    sim_worker(system, "a", room=1)
    assert (await answer.terminal())["finish_reason"] == "length"
    check_stream(answer)


async def test_a_request_is_held_for_no_longer_than_that(system: System) -> None:
    system.router("router", "--hold-s", "1", "--expect-model", "a")
    bare = await system.connect()
    await listed(bare)
    began = time.monotonic()
    assert (await complete(bare, "a"))["error"]["code"] == "no_worker"
    assert time.monotonic() - began > 0.9


async def test_a_request_outlives_the_worker_that_is_killed_while_it_loads(system: System) -> None:
    system.router("router", "--hold-s", "30")
    system.worker("worker", "--memory-budget-mib", "200", served_name="a")
    bare = await system.connect()
    await listed(bare, "a")
    answer = await ask(bare, "a")
    async with asyncio.timeout(10):
        while not engines(system):
            await asyncio.sleep(0.005)
    system.kill("worker")
    system.worker("worker", "--memory-budget-mib", "200", served_name="a")
    assert (await answer.terminal())["finish_reason"] == "length"
    check_stream(answer)


async def test_an_engine_that_dies_and_can_t_be_loaded_again_gives_its_memory_back(
    system: System, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(demo.MODEL_PATH.read_bytes())
    system.router("router")
    arguments = models("other", "model", model=path, engine="auto")
    system.worker("worker", *arguments, "--memory-budget-mib", "200", served_name="other")
    bare = await system.connect()
    await listed(bare, "other", "model")
    assert (await complete(bare, "model"))["finish_reason"] == "length"
    path.unlink()
    os.kill(engines(system).pop(), signal.SIGKILL)
    await system.until_logged("worker", "model_not_loaded")
    assert "there is no such file" in (await complete(bare, "model"))["error"]["message"]
    assert (await complete(bare, "other"))["finish_reason"] == "length"
