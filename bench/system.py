"""A whole system for measurements: broker, router, workers and gateway, each in its own process on this machine."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process.parent import end_with_parent
from tokenbus.protocol.wire import errors, messages

_CPU_CLOCK = 2
"""Linux's number of the exact CPU clock of a process, in the clock ids that it makes from process ids."""


class System(NamedTuple):
    """A running system. Its processes write their logs into `folder`."""

    client: WireClient
    nats_url: str
    folder: Path
    broker_pid: int
    router_pid: int
    worker_pids: list[int]


@contextlib.asynccontextmanager
async def running(model: Path, *worker: str) -> AsyncIterator[WireClient]:
    """Yields a client of a system that serves `model` as `m`; `worker` are further arguments of its worker."""
    async with started(model, worker) as one:
        yield one.client


@contextlib.asynccontextmanager
async def started(
    model: Path, *workers: Sequence[str], python: Path = Path(sys.executable), pinned: bool = False
) -> AsyncIterator[System]:
    """Starts a system with one worker for each list of arguments, by the Python of this or another checkout.
    With `pinned`, each worker has a core of its own."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        nats = await nats_server.start(0, folder / "nats.log")
        served = ("worker", "--nats", nats.url, "--model", str(model), "--served-name", "m")
        cores = sorted(os.sched_getaffinity(0))
        processes = [start(folder / "router.log", "router", "--nats", nats.url, python=python)]
        for number, flags in enumerate(workers):
            processes.append(start(folder / f"worker{number}.log", *served, *flags, python=python))
            if pinned:
                os.sched_setaffinity(processes[-1].pid, {cores[number]})
        router_pid, *worker_pids = (process.pid for process in processes)
        try:
            async with await WireClient.connect(nats.url) as client:
                await cards(client, len(workers))
                yield System(client, nats.url, folder, nats.pid, router_pid, worker_pids)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=60)
            nats.stop()


@contextlib.asynccontextmanager
async def gateway(one: System) -> AsyncIterator[tuple[str, int]]:
    """Runs a gateway; yields the base URL of its OpenAI API and its process id."""
    port = free_port()
    process = start(one.folder / "gateway.log", "gateway", "--nats", one.nats_url, "--port", str(port))
    try:
        await until_listening(port)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextlib.contextmanager
def other_server(command: Callable[[int], Sequence[str]]) -> Iterator[int]:
    """Runs a server that Tokenbus is compared with; yields its port, on which it need not listen yet."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(port), stdout=log, stderr=log, preexec_fn=end_with_parent)
        try:
            yield port
        finally:
            process.kill()
            process.wait()


async def until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def cards(client: WireClient, count: int = 1) -> list[messages.Card]:
    """Waits until this many workers are ready and returns their cards."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(errors.RequestError):
                cards = (await client.models(timeout_s=1.0)).cards
                found = [card for card in cards if card.state is messages.WorkerState.READY]
                if len(found) >= count:
                    return found
            await asyncio.sleep(0.1)


async def engine_pid(client: WireClient) -> int:
    """Waits until a worker is ready and returns its engine's process id."""
    return (await cards(client))[0].pids.engine


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that all threads of a process have used so far."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1_024


def main_thread_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process's main thread has used so far, exact to a microsecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def start(log_path: Path, *arguments: str, python: Path = Path(sys.executable)) -> "subprocess.Popen[bytes]":
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [python, "-m", "tokenbus.cli.start", *arguments],
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # or this folder's code would run, whichever Python it is
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,
        )
