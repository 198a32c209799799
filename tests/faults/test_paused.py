"""A process that stands still and goes on: one terminal for each request, no texts mixed, and nothing left behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Client
from tests.support.bare import Bare
from tests.support.load import Told, ask, cards, until_idle, until_ready
from tests.support.system import System

VICTIMS = ("engine", "front", "router")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # a stuck engine is ended by its front
            os.kill(pid, signal.SIGCONT)


async def pid_of(system: System, bare: Bare, victim: str) -> int:
    if victim == "router":
        return system.pid("router-a")
    (card,) = [card for card in await cards(bare) if card["worker_id"] == "worker-a"]
    return int(card["pids"][victim])


async def freeze_under_load(folder: Path, victim: str, seconds: float) -> list[Told]:
    """Freezes one process of a system with two of each under load, and checks what must hold for all its streams."""
    system = await System.start(folder)
    try:
        for name in ("router-a", "router-b"):
            system.router(name)
        for name in ("worker-a", "worker-b"):
            system.worker(name, "--step-timeout-s", "5")
        bare = await system.connect()
        await until_ready(bare, 2)
        async with await Client.connect(system.url) as client:
            undisturbed = await ask(client, 400, logprobs=5).end()
            told = [ask(client, 400) for _ in range(8)]
            await asyncio.gather(*(one.speaks() for one in told))
            with frozen(await pid_of(system, bare, victim)):
                told += [ask(client, 30) for _ in range(8)]
                await asyncio.sleep(seconds)
            for one in await asyncio.gather(*(one.end() for one in told)):
                one.check(undisturbed)
            await until_ready(bare, 2)
            await until_idle(bare)
            last = [ask(client, 20) for _ in range(8)]
            for one in await asyncio.gather(*(one.end() for one in last)):
                assert one.is_whole, one.terminal
                one.check(undisturbed)
        return told
    finally:
        await system.stop()


def harmed(told: list[Told]) -> set[object]:
    """The workers that had accepted the streams which did not come to their end."""
    return {chunk.worker_id for one in told if not one.is_whole for chunk in one.chunks if chunk.worker_id}


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_process_that_stands_still_for_a_moment_harms_at_most_its_own_streams(
    tmp_path: Path, victim: str
) -> None:
    folders = [tmp_path / "blink", tmp_path / "nap"]
    for folder in folders:
        folder.mkdir()
    blink, nap = await asyncio.gather(
        freeze_under_load(folders[0], victim, 0.5), freeze_under_load(folders[1], victim, 3.0)
    )
    assert all(one.is_whole for one in blink)
    assert harmed(nap) <= (set() if victim == "router" else {"worker-a"})


async def test_processes_that_stand_still_for_forty_seconds_harm_at_most_their_own_streams(tmp_path: Path) -> None:
    """One of each kind, each in a system of its own, beside each other."""
    folders = [tmp_path / victim for victim in VICTIMS]
    for folder in folders:
        folder.mkdir()
    pauses = [freeze_under_load(folder, victim, 40.0) for folder, victim in zip(folders, VICTIMS, strict=True)]
    engine, front, router = await asyncio.gather(*pauses)
    assert harmed(engine) <= {"worker-a"}
    assert harmed(front) <= {"worker-a"}
    assert harmed(router) == set()
