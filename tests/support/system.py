"""A whole system of real processes for tests: broker, routers and workers, each of which can be killed."""

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from tests.support.raw_client import RawClient
from tokenbus import demo
from tokenbus.cli.console import nats_server
from tokenbus.protocol.process.parent import end_with_parent


def command(*arguments: str, python: Path | None = None) -> list[str]:
    """Returns the command line of `tokenbus`, of this version or of the one in another Python's environment."""
    return [str(python or sys.executable), "-m", "tokenbus.cli.start", *arguments]


def environment(python: Path | None = None) -> dict[str, str]:
    """Returns the variables of such a process, which imports only what is installed in another environment."""
    safe = {} if python is None else {"PYTHONSAFEPATH": "1"}
    return os.environ | {"TOKENBUS_DEBUG": "1", "TOKENBUS_LOG_FORMAT": "json"} | safe


@contextlib.contextmanager
def running_up(*arguments: str) -> Iterator[str]:
    """Runs `tokenbus up` without a gateway; yields the broker's URL."""
    with up_with_output("--no-gateway", *arguments) as said:
        assert said["http"] is None
        yield said["nats"]


@contextlib.contextmanager
def up_with_output(*arguments: str) -> Iterator[dict[str, Any]]:
    """Runs `tokenbus up` on a free port; yields its line of JSON, then stops it and checks its exit status."""
    with _saying(command("up", "--port", "0", "--json", *arguments)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "tokenbus up ended before it was ready"
        yield json.loads(line)


class Gateway:
    """A gateway process."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        """The `base_url` for OpenAI's clients."""
        self._log_path = log_path

    def log(self, event: str) -> list[dict[str, Any]]:
        """Returns the log lines of an event."""
        lines = [json.loads(line) for line in self.text_log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def ended(self, request_id: str) -> dict[str, Any]:
        """Waits for the log line of a request's end and returns it."""
        async with asyncio.timeout(60):
            while True:
                for line in self.log("request_finished"):
                    if line["request_id"] == request_id:
                        return line
                await asyncio.sleep(0.02)

    def text_log(self) -> str:
        return self._log_path.read_text()


@contextlib.contextmanager
def running_gateway(nats_url: str, folder: Path, *arguments: str, **variables: str) -> Iterator[Gateway]:
    """Runs `tokenbus gateway` on a free port."""
    log_path = folder / "gateway.log"
    with log_path.open("ab") as log:
        saying = _saying(command("gateway", "--nats", nats_url, "--port", "0", *arguments), log, variables)
        with saying as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the gateway ended before it was ready: {log_path.read_text()}"
            yield Gateway(process, line.split()[-1], log_path)


@contextlib.contextmanager
def running_worker(nats_url: str, *arguments: str) -> Iterator[None]:
    """Runs `tokenbus worker`, which may still be loading its model."""
    with _saying(command("worker", "--nats", nats_url, *arguments)):
        yield


@contextlib.contextmanager
def _saying(
    arguments: list[str], log: BinaryIO | int = subprocess.DEVNULL, variables: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment() | dict(variables or {}),
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        process.stdout.close()


class System:
    """A broker, routers and workers as processes that nobody restarts."""

    def __init__(self, nats: nats_server.NatsServer, folder: Path, config: Path | None = None) -> None:
        self._broker = nats
        self._config = config
        self._folder = folder
        self.url = nats.url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: collections.Counter[str] = collections.Counter()
        self._log_starts: dict[str, int] = {}
        """Where in each log the lines of the last start begin."""
        self._clients: list[RawClient] = []

    @classmethod
    async def start(cls, folder: Path, config: Path | None = None) -> "System":
        return cls(await nats_server.start(0, folder / "nats.log", config), folder, config)

    def router(self, name: str, *arguments: str, python: Path | None = None) -> None:
        """Starts a router that also logs when it receives a request and when a worker has accepted it."""
        self.run(name, "router", "--router-id", name, "--log-level", "debug", *arguments, python=python)

    def worker(
        self,
        name: str,
        *arguments: str,
        model: str | Path = demo.MODEL_PATH,
        served_name: str = "demo",
        python: Path | None = None,
    ) -> None:
        """Starts a worker. With `--nats` among the arguments it reaches the broker another way."""
        settings = ["--model", str(model), "--served-name", served_name, "--threads", "1", "--worker-id", name]
        self.run(name, "worker", *settings, *arguments, python=python)

    def gateway(self, name: str, *arguments: str, python: Path | None = None) -> None:
        """Starts a gateway on a free port, which its log line `gateway_ready` names."""
        self.run(name, "gateway", "--port", "0", *arguments, python=python)

    async def restart_broker(self, pause_s: float = 0.0) -> None:
        """Kills the broker and starts another on the same port after a pause."""
        port = urlsplit(self.url).port or 0
        self._broker.kill()
        await asyncio.sleep(pause_s)
        self._broker = await nats_server.start(port, self._folder / "nats.log", self._config)

    @contextlib.contextmanager
    def broker_frozen(self) -> Iterator[None]:
        """Freezes the broker, which then answers nothing."""
        os.kill(self._broker.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._broker.pid, signal.SIGCONT)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Ends a process and all that it has started at once, also those that stand still."""
        for pid in self.family(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._processes[name].wait(timeout=60.0)

    async def wait(self, name: str, timeout_s: float = 60.0) -> int:
        """Waits until a process has ended, while clients go on answering their broker; returns its exit code."""
        return await asyncio.to_thread(self._processes[name].wait, timeout_s)

    def num_starts(self, name: str) -> int:
        """Returns how many processes of this name have been started."""
        return self._starts[name]

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def family(self, name: str) -> list[int]:
        """Returns the pids of a process and of all that it has started, itself first; none if it has ended."""
        if self._processes[name].poll() is not None:
            return []
        parents = _parents()
        found = [self.pid(name)]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def engine_pid(self, name: str) -> int:
        """Returns the pid of a worker's first engine: what forks engines for tests is a child of the worker too."""
        return next(
            pid for pid in self.family(name) if b"engine.process.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def memory_bytes(self, name: str) -> int:
        """Returns the resident memory of a process."""
        for line in Path(f"/proc/{self.pid(name)}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"{name} is not running")

    async def until_logged(self, name: str, event: str, timeout_s: float = 60.0) -> None:
        """Waits for an event since the last start of this name."""
        async with asyncio.timeout(timeout_s):
            while not self.logged(name, event):
                await asyncio.sleep(0.02)

    def logged(self, name: str, event: str) -> list[dict[str, object]]:
        """Returns the log lines of an event since the last start of this name."""
        return self.log(name, self._log_starts[name], event=event)

    async def first_to_log(self, names: Iterable[str], event: str) -> str:
        """Waits until one of several processes has logged an event; returns its name."""
        async with asyncio.timeout(60):
            while True:
                for name in names:
                    if self.log(name, event=event):
                        return name
                await asyncio.sleep(0.02)

    def log(self, name: str, start: int = 0, *, event: str = "") -> list[dict[str, object]]:
        """Returns the structured log lines of a process, all or those of an event, from a byte of its log on."""
        with (self._folder / f"{name}.log").open("rb") as log:
            log.seek(start)
            *lines, _ = log.read().split(b"\n")  # the last one may be half written
        # A log may have megabytes, whose parsing would keep this process from answering its broker's pings.
        found = [json.loads(line) for line in lines if line.startswith(b"{") and event.encode() in line]
        return [line for line in found if not event or line["event"] == event]

    def text_log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    async def connect(self, *, reconnects: bool = False) -> RawClient:
        """Connects a client that is closed together with the system."""
        self._clients.append(await RawClient.connect(self.url, reconnects=reconnects))
        return self._clients[-1]

    async def stop(self) -> None:
        try:
            for client in self._clients:
                await client.close()
        finally:
            for name in self._processes:
                self.kill(name)
            self._broker.stop()

    def run(self, name: str, *arguments: str, python: Path | None = None) -> None:
        """Starts a process of `tokenbus` with these arguments."""
        self._starts[name] += 1
        with (self._folder / f"{name}.log").open("ab") as log:
            self._log_starts[name] = log.tell()
            self._processes[name] = subprocess.Popen(
                command(*arguments, *([] if "--nats" in arguments else ["--nats", self.url]), python=python),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(python),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )


def _parents() -> dict[int, int]:
    """Returns the parent of each process of this machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found
