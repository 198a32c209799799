"""A process that a zygote has forked can't be told from one that was executed, by those who start it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.system import command

WAITS = command("router", "--nats", "nats://127.0.0.1:1")
"""A router that looks for its broker until it is ended."""


@pytest.fixture
def waiting() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(WAITS, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("arguments", [("router", "--help"), ("worker", "--bogus"), ("config", "show", "router")])
def test_it_says_and_returns_the_same(arguments: tuple[str, ...], tmp_path: Path) -> None:
    def run() -> tuple[int, str, str]:
        done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    forked = run()
    with zygote.uninstalled():
        assert run() == forked


def test_it_is_a_child_with_a_session_and_arguments_of_its_own(waiting: "subprocess.Popen[bytes]") -> None:
    shown, until = Path(f"/proc/{waiting.pid}/cmdline"), time.monotonic() + 60
    while shown.read_text().rstrip("\0").split("\0") != WAITS:  # it becomes this process soon after it is forked
        assert time.monotonic() < until
        time.sleep(0.01)
    fields = Path(f"/proc/{waiting.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) == os.getpid()
    assert os.getsid(waiting.pid) == waiting.pid


def test_it_can_be_killed(waiting: "subprocess.Popen[bytes]") -> None:
    waiting.kill()
    assert waiting.wait(60) == -signal.SIGKILL


def test_it_is_forked_and_not_executed(waiting: "subprocess.Popen[bytes]") -> None:
    executed = Path(f"/proc/{waiting.pid}/environ").read_bytes()
    assert b"OPENBLAS_NUM_THREADS=1" in executed.split(b"\0")  # of its zygote
