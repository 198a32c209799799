"""Workers and routers that are stopped, and routers that are killed before a worker, cut no stream."""

import asyncio
import signal

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import Answer, RawClient, check_stream
from tests.support.system import System

LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
ROUTERS, WORKERS = ("router-a", "router-b"), ("worker-a", "worker-b")
AT_ONCE = ("--grace-s", "0")
"""A worker gives up its streams as soon as it is stopped."""
TIMED = ("--engine", "sim")
"""Streams last equally long on every machine: 20 tokens a second."""


async def started(bare: RawClient, count: int, **more: object) -> list[Answer]:
    """Starts streams and waits until each has sent tokens."""
    answers = [await bare.generate(LONG | more) for _ in range(count)]
    for answer in answers:
        await answer.until(3)
    return answers


def worker_of(answer: Answer) -> str:
    """Returns the worker that began a stream."""
    return str(next(message["worker_id"] for message in answer.messages if message.get("worker_id")))


async def check_all_went_on(answers: list[Answer], calm: Answer) -> list[int]:
    """Checks that every stream has all its tokens, and returns their last attempts. `calm` is one of the same text that
    nobody has disturbed."""
    attempts = []
    for answer in answers:
        terminal = await answer.terminal()
        assert terminal["finish_reason"] == "length", terminal
        # a router that holds a stream says so, and does not know its text
        answer.messages = [message for message in answer.messages if message.get("worker_id", "") is not None]
        check_stream(answer)
        attempts.append(terminal["attempt"])
    assert len({answer.text for answer in (*answers, calm)}) <= 3  # near ties may fall otherwise in other batches
    return attempts


async def test_streams_go_on_at_another_worker_when_theirs_is_stopped(system: System) -> None:
    system.router("router")
    for name in WORKERS:
        system.worker(name, *AT_ONCE)
    bare = await system.connect()
    await until_ready(bare, 2)
    short = LONG | {"max_tokens": 400}
    calm = await bare.ask(short)
    answers = await started(bare, 4, **short)
    workers = [worker_of(answer) for answer in answers]
    whole = await bare.generate(short | {"id": "whole", "stream": False})
    system.signal(workers[0], signal.SIGTERM)
    assert await system.wait(workers[0]) == 0
    assert await check_all_went_on(answers, calm) == [1 + (worker == workers[0]) for worker in workers]
    assert (await whole.terminal())["usage"]["completion_tokens"] == short["max_tokens"]


@pytest.mark.long
async def test_streams_of_the_only_worker_go_on_when_it_is_stopped_and_started_again(system: System) -> None:
    system.router("router")
    system.worker("worker", *AT_ONCE)
    bare = await system.connect()
    await until_ready(bare, 1)
    calm = await bare.ask(LONG)
    answers = await started(bare, 2)
    system.signal("worker", signal.SIGTERM)
    assert await system.wait("worker") == 0
    system.worker("worker")
    assert await check_all_went_on(answers, calm) == [2] * 2


@pytest.mark.parametrize(
    "how",
    # That of a stopped router is proved by tests/sim/test_handover.py in every run.
    [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL],
    ids=["stopped", "killed"],
)
@pytest.mark.long
async def test_streams_survive_their_worker_after_their_router_was(system: System, how: signal.Signals) -> None:
    for name in ROUTERS:
        system.router(name)
    for name in WORKERS:
        system.worker(name, *TIMED, model="steps-of-50ms")
    bare = await system.connect()
    await until_ready(bare, 2)
    for name in ROUTERS:
        await system.until_logged(name, "router_ready")
    answers = await started(bare, 6, max_tokens=300)
    async with asyncio.timeout(60):
        while len(requests_in("request_placed", system, *ROUTERS)) < len(answers):  # their first tokens may come before
            await asyncio.sleep(0.02)
    placed = requests_in("request_placed", system, "router-a")
    system.signal("router-a", how)
    async with asyncio.timeout(60):
        while not placed <= requests_in("guardian_changed", system, *WORKERS):
            await asyncio.sleep(0.05)
    system.signal("worker-a", signal.SIGKILL)
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "length"
        check_stream(answer)


def requests_in(event: str, system: System, *processes: str) -> set[object]:
    return {line["request_id"] for name in processes for line in system.log(name) if line["event"] == event}
