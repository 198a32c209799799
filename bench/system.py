"""A whole system for measurements: broker, router and one worker, each in its own process on this machine."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tokenbus.cli.console import nats_server
from tokenbus.client import Client
from tokenbus.protocol.process.parent import end_with_parent
from tokenbus.protocol.wire import errors, messages

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class System(NamedTuple):
    """A running system."""

    client: Client
    nats_url: str
    router_pid: int
    folder: Path
    """The folder of its logs."""


@contextlib.asynccontextmanager
async def running(model: Path, *worker: str) -> AsyncIterator[Client]:
    """Yields a client of a system that serves `model` as `m`; `worker` are further arguments of its worker."""
    async with started(model, worker) as one:
        yield one.client


@contextlib.asynccontextmanager
async def started(
    model: Path,
    worker: Sequence[str],
    router: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    python: Path = Path(sys.executable),
) -> AsyncIterator[System]:
    """`running` with further arguments of the router, variables for both, and the Python of another checkout."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        nats = await nats_server.start(0, folder / "nats.log")
        served = ("worker", "--nats", nats.url, "--model", str(model), "--served-name", "m", *worker)
        processes = [
            start(folder / "router.log", "router", "--nats", nats.url, *router, variables=variables, python=python),
            start(folder / "worker.log", *served, variables=variables, python=python),
        ]
        try:
            async with await Client.connect(nats.url) as client:
                await card(client)
                yield System(client, nats.url, processes[0].pid, folder)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=30)
            nats.stop()


def status_port(log: Path) -> int:
    """Returns the port of a process's metrics, from its log."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return int(next(line["port"] for line in lines if line["event"] == "status_page"))


async def card(client: Client) -> messages.Card:
    """Waits until the worker is ready and returns its card."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(errors.RequestError):
                for served in (await client.models(timeout_s=1.0)).models:
                    for one in served.workers or []:
                        if one.state is messages.WorkerState.READY:
                            return one
            await asyncio.sleep(0.1)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that all threads of a process have used so far, exact to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def start(
    log_path: Path,
    *arguments: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    python: Path = Path(sys.executable),
) -> "subprocess.Popen[bytes]":
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [python, "-m", "tokenbus.cli.start", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | dict(variables),
            preexec_fn=end_with_parent,
        )
