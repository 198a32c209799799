"""One of two routers stands still: soon nothing depends on it any more, and when it runs again nothing is doubled."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.support.exact_client import until_idle, until_ready
from tests.support.raw_client import Answer, RawClient
from tests.support.system import System

DROPPED_S = 4.5
"""The broker has dropped a router that stands still for 3 s; on a busy machine it may come to that later."""
LONG = 240
"""Tokens of a stream that lasts longer than it takes to replace a guardian, at a step of 50 ms each."""
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@contextlib.asynccontextmanager
async def started(folder: Path, config: Path | None = None) -> AsyncIterator[System]:
    system = await System.start(folder, config)
    for name in ("router-a", "router-b"):
        system.router(name)
    for name in ("worker-a", "worker-b"):
        system.worker(name, "--engine", "sim", model="steps-of-50ms")
    await until_ready(await system.connect(), 2)
    for name in ("router-a", "router-b"):
        await system.until_logged(name, "router_ready")
    yield system
    os.kill(system.pid("router-a"), signal.SIGCONT)
    await system.stop()


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with started(tmp_path) as system:
        yield system


async def until_replaced(system: System, router: str, answers: Iterable[Answer]) -> None:
    """Waits until each stream that workers have taken from a router has another guardian, or has ended."""
    async with asyncio.timeout(30):
        while True:
            said = [line for name in ("worker-a", "worker-b") for line in system.log(name)]
            lost = sum(
                int(str(line["streams"]))
                for line in said
                if line["event"] == "guardian_lost" and line["router_id"] == router
            )
            changed = sum(line["event"] == "guardian_changed" for line in said)
            if 0 < lost <= changed + sum(len(answer.terminals) for answer in answers):
                return
            await asyncio.sleep(0.05)


async def guarded_by(system: System, router: str, bare: RawClient) -> dict[str, Answer]:
    """Asks for eight streams and more, until this router guards one of them: the broker draws lots for each."""
    answers: dict[str, Answer] = {}
    while len(answers) < 8 or not any(placed_by(system, router, name) for name in answers):
        assert len(answers) < 64, f"{router} was never drawn"
        name = f"r{len(answers)}"
        answers[name] = await bare.generate(STORY | {"max_tokens": LONG, "id": name})
        await answers[name].until(2)
    return answers


def placed_by(system: System, router: str, request_id: str) -> bool:
    return any(line.get("request_id") == f"default:{request_id}" for line in system.log(router))


@pytest.mark.long
async def test_requests_after_three_seconds_are_answered_and_streams_are_not_disturbed(system: System) -> None:
    bare = await system.connect()
    running = [await bare.generate(STORY | {"max_tokens": LONG}) for _ in range(4)]
    for answer in running:
        await answer.until(2)
    system.signal("router-a", signal.SIGSTOP)
    await asyncio.sleep(DROPPED_S)
    answers = [await bare.generate(STORY | {"max_tokens": 8}) for _ in range(12)]
    for answer in (*answers, *running):
        assert (await answer.terminal())["finish_reason"] == "length"
        assert answer.flaws == (0, 0)


@pytest.mark.long
async def test_a_frozen_guardian_is_replaced_so_that_its_streams_outlive_their_worker(system: System) -> None:
    bare = await system.connect()
    answers = await guarded_by(system, "router-a", bare)
    system.signal("router-a", signal.SIGSTOP)
    await asyncio.sleep(DROPPED_S + 2)  # workers ask once a second, and offer what has no guardian
    system.kill("worker-a")
    for answer in answers.values():
        assert (await answer.terminal(90))["finish_reason"] == "length"
    os.kill(system.pid("router-a"), signal.SIGCONT)
    await until_idle(bare)
    await asyncio.sleep(1)  # whatever a router that runs again believes, it has said by now
    for answer in answers.values():
        assert len(answer.terminals) == 1
        assert answer.flaws == (0, 0)
        assert answer.num_tokens == LONG


@pytest.mark.long
async def test_workers_replace_a_frozen_guardian_whose_connection_the_broker_keeps(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text('ping_interval: "2m"\n')
    async with started(tmp_path, config) as system:
        bare = await system.connect()
        answers = await guarded_by(system, "router-a", bare)
        await asyncio.sleep(1.5)  # each guardian has answered once
        system.signal("router-a", signal.SIGSTOP)
        await until_replaced(system, "router-a", answers.values())
        system.kill("worker-a")
        for answer in answers.values():
            assert (await answer.terminal(90))["finish_reason"] == "length"
        os.kill(system.pid("router-a"), signal.SIGCONT)
        await until_idle(bare)
        await asyncio.sleep(1)
        for answer in answers.values():
            assert len(answer.terminals) == 1
            assert answer.flaws == (0, 0)
            assert answer.num_tokens == LONG


@pytest.mark.long
async def test_a_router_that_runs_again_serves_like_before(system: System) -> None:
    bare: RawClient = await system.connect()
    system.signal("router-a", signal.SIGSTOP)
    await asyncio.sleep(DROPPED_S)
    os.kill(system.pid("router-a"), signal.SIGCONT)
    async with asyncio.timeout(30):
        answers = [await bare.ask(STORY | {"max_tokens": 4}) for _ in range(20)]
    assert [answer.terminals[0]["finish_reason"] for answer in answers] == ["length"] * 20
