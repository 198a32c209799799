"""The library and the commands for users need nothing that Windows lacks, and the other commands say so.

Windows itself is not here: a process takes away the modules, functions and signals that it lacks."""

import subprocess
import sys

import pytest

from tokenbus.cli.console import catalog, needs

BEFORE = """
import asyncio, os, signal, sys
import msgspec, multiprocessing, nats, nkeys, prompt_toolkit, rich.live, rich.table, shutil, structlog, tempfile, xxhash

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fork", "geteuid", "getuid", "kill", "killpg", "sched_getaffinity", "setsid", "sysconf"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGTSTP", "SIGUSR1", "pthread_sigmask", "pidfd_send_signal"):
    delattr(signal, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules.pop(name, None)
for kind in (asyncio.SelectorEventLoop, asyncio.BaseEventLoop):
    kind.add_signal_handler = kind.remove_signal_handler = asyncio.AbstractEventLoop.add_signal_handler
sys.meta_path.insert(0, Absent())
sys.platform = "win32"
"""
COMMANDS = [name for name in catalog.COMMANDS if name not in needs.ON_UNIX]


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BEFORE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_library_and_the_flags_of_every_command_for_users_can_be_imported() -> None:
    code = """
import tokenbus
from tokenbus.cli.console import catalog
for name in tokenbus.__all__:
    getattr(tokenbus, name)
for name in sys.argv[1:]:
    catalog.make_parser(name)
"""
    done = run(code, *COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"generate", "chat", "top", "keys", "wire-check", "bench"} <= {*COMMANDS}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["top", "--once", "--nats", "nats://127.0.0.1:1"], "tokenbus: no NATS broker at nats://127.0.0.1:1"),
        (["generate", "--nats", "nats://127.0.0.1:1", "--model", "m", "x"], "tokenbus: no NATS broker"),
        (["worker"], "tokenbus: the command worker does not run on Windows; use WSL or a container for it"),
    ],
)
def test_a_command_runs_or_says_why_it_does_not(command: list[str], line: str) -> None:
    done = run("from tokenbus.cli import main\nmain.main()", *command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1
