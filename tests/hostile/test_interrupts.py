"""Ctrl-C at any moment: the first stops a command, the second stops it at once, and neither leaves a process behind."""

import os
import secrets
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.scale import times
from tests.support.system import running_up

TOKENBUS = str(Path(sysconfig.get_path("scripts")) / "tokenbus")
READY_S = 2.3
"""Time after which every command is fully running on an idle machine."""
PATIENCE_S = 40.0
STATUSES = {0, 128 + signal.SIGINT, -signal.SIGINT}
MODEL = ("--model", "demo")
COMMANDS = {
    "up": ("up", "--port", "0", "--gateway-port", "0", "--workers", "1"),
    "router": ("router",),
    "worker": ("worker", *MODEL, "--threads", "1", "--grace-s", "1"),
    "gateway": ("gateway", "--port", "0"),
    "generate": ("generate", *MODEL, "--raw", "--max-tokens", "1900", "Once"),
    "chat": ("chat", *MODEL),
    "top": ("top",),
    "bench": ("bench", *MODEL, "--requests", "1000"),
    "wire-check": ("wire-check", *MODEL),
    "doctor": ("doctor",),
    "models": ("models",),
    "replay": ("replay", "conversations", "--jobs", "2"),
    "no broker": ("router", "--nats", "nats://127.0.0.1:1"),
}
SHORT = ("up", "worker", "generate")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_up("--workers", "1") as url:
        yield url


class Running:
    """A command started like from a terminal, with all its child processes."""

    def __init__(self, url: str, arguments: tuple[str, ...]) -> None:
        self._mark = f"MARK_OF_A_TEST={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        environment = os.environ | {"TOKENBUS_NATS": url, name: value}
        self._process = subprocess.Popen(
            [TOKENBUS, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def until_begun(self) -> None:
        """Waits until our code runs. Before that, Python itself catches SIGINT and prints a traceback, which can't be
        avoided; restoring the default action is the first thing `tokenbus` does."""
        for is_caught in (True, False):
            deadline = time.monotonic() + 5.0
            while self._catches_interrupts() is not is_caught and time.monotonic() < deadline:
                time.sleep(0.001)

    def _catches_interrupts(self) -> bool:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
        return False

    def interrupt(self) -> None:
        """Sends SIGINT to the whole process group, like a terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def check_end(self, patience_s: float) -> None:
        """Checks that the command and all its children end in time and without a traceback."""
        deadline = time.monotonic() + patience_s
        try:
            _, said = self._process.communicate(timeout=patience_s)
            assert b"Traceback" not in said, said.decode()
            assert self._process.returncode in STATUSES, (self._process.returncode, said.decode())
            while left := self._left():
                assert time.monotonic() < deadline, left
                time.sleep(0.02)
        finally:
            for pid in self._left():
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


@pytest.mark.parametrize("name", COMMANDS)
def test_a_first_ctrl_c_stops_every_command_at_every_moment(name: str, url: str) -> None:
    count = times(int(name in SHORT), 60)
    for number in range(count):
        running = Running(url, COMMANDS[name])
        moment = secrets.SystemRandom().random() if count == 1 else number / count
        running.until_begun()
        time.sleep(READY_S * moment)
        running.interrupt()
        running.check_end(PATIENCE_S)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_ctrl_c_stops_every_command_at_once(name: str, url: str) -> None:
    count = times(int(name == "up"), 30)
    for number in range(count):
        running = Running(url, COMMANDS[name])
        running.until_begun()
        time.sleep(READY_S * (number + 1) / count)
        running.interrupt()
        time.sleep(0.02 * number / count)
        running.interrupt()
        running.check_end(5.0)
