"""A process is frozen and continued: every stream of the library goes on, no texts mix, and nothing is left over."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hostile.scale import IS_LONG, times
from tests.support.exact_client import ask, cards, until_idle, until_ready
from tests.support.raw_client import RawClient
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

VICTIMS = ("engine", "front", "router")
PAUSES_S = (*((0.5,) if IS_LONG else ()), 3.0, times(15, 40))
"""A moment, in the long form; longer than a frontend may be silent; longer than any limit of a stream. The longest of
these is the 10 s of silence that a client waits, with two resyncs after it."""
NUM_TOKENS = times(150, 300)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # a stuck engine is ended by its frontend
            os.kill(pid, signal.SIGCONT)


async def pid_of(system: System, bare: RawClient, victim: str) -> int:
    if victim == "router":
        return system.pid("router-a")
    (card,) = [card for card in await cards(bare) if card["worker_id"] == "worker-a"]
    return int(card["pids"][victim])


async def started(folder: Path) -> System:
    """Starts two routers and two workers."""
    system = await System.start(folder)
    for name in ("router-a", "router-b"):
        system.router(name)
    for name in ("worker-a", "worker-b"):
        system.worker(name, "--step-timeout-s", "5")
    return system


@pytest.fixture
async def systems(tmp_path: Path) -> AsyncIterator[dict[str, System]]:
    """One system for each kind of victim."""
    folders = {victim: tmp_path / victim for victim in VICTIMS}
    for folder in folders.values():
        folder.mkdir()
    found = {victim: await started(folder) for victim, folder in folders.items()}
    for system in found.values():
        await until_ready(await system.connect(), 2)
    yield found
    for system in found.values():
        await system.stop()


async def freeze_under_load(system: System, victim: str) -> None:
    """Freezes one process of a system under load for longer and longer, and checks all streams."""
    bare = await system.connect()
    async with await WireClient.connect(system.url) as client:
        undisturbed = await ask(client, NUM_TOKENS, logprobs=5).end()
        for seconds in PAUSES_S:
            told = [ask(client, NUM_TOKENS) for _ in range(4)]
            await asyncio.gather(*(one.speaks() for one in told))
            with frozen(await pid_of(system, bare, victim)):
                told += [ask(client, 30) for _ in range(4)]
                await asyncio.sleep(seconds)
            for one in await asyncio.gather(*(one.end() for one in told)):
                one.check(undisturbed)
            assert all(one.is_whole for one in told), (victim, seconds)
            await until_ready(bare, 2)
            await until_idle(bare)
            last = [ask(client, 20) for _ in range(4)]
            for one in await asyncio.gather(*(one.end() for one in last)):
                assert one.is_whole, one.terminal
                one.check(undisturbed)


@pytest.mark.long
async def test_a_process_that_stands_still_ends_no_stream_of_the_library(
    systems: dict[str, System],
) -> None:
    """Each kind of process is frozen in its own system, all at the same time."""
    async with asyncio.TaskGroup() as group:
        for victim, system in systems.items():
            group.create_task(freeze_under_load(system, victim))


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "(zombie)" in status.read_text()


async def test_an_engine_that_stands_still_ends_with_its_killed_frontend(tmp_path: Path) -> None:
    system = await System.start(tmp_path)
    system.router("router")
    system.worker("worker-a")
    bare = await system.connect()
    await until_ready(bare, 1)
    engine = await pid_of(system, bare, "engine")
    with frozen(engine):
        system.signal("worker-a", signal.SIGKILL)
        await system.wait("worker-a")
        async with asyncio.timeout(10):
            while not has_ended(engine):
                await asyncio.sleep(0.02)
    await system.stop()
