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

SECONDS = (0.5, 3.0, 40.0)


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
            undisturbed = (await ask(client, 400).end()).text
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


@pytest.mark.parametrize("victim", ["engine", "front", "router"])
async def test_a_process_that_stands_still_harms_at_most_its_own_streams(tmp_path: Path, victim: str) -> None:
    """The three pauses run beside each other, since the longest takes most of a minute."""
    folders = [tmp_path / str(seconds) for seconds in SECONDS]
    for folder in folders:
        folder.mkdir()
    pauses = [freeze_under_load(folder, victim, seconds) for folder, seconds in zip(folders, SECONDS, strict=True)]
    blink, nap, sleep = await asyncio.gather(*pauses)
    assert all(one.is_whole for one in blink)
    if victim == "router":
        assert all(one.is_whole for one in (*nap, *sleep))
    else:
        assert sum(one.is_whole for one in sleep) >= 8
