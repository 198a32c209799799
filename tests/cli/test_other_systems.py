"""The library and the commands for users need nothing that Windows or macOS lacks, and the other commands say so.

Neither system is here: a process takes away the modules, functions and signals that it lacks."""

import subprocess
import sys

import pytest

from tokenbus.cli.console import catalog, needs

WINDOWS = """
import asyncio, os, signal, sys
import filelock, msgspec, multiprocessing, nats, nkeys, prompt_toolkit, shutil, structlog, tempfile, xxhash
import rich.live, rich.table

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
MACOS = """
import asyncio, multiprocessing, os, select, signal, socket, subprocess, sys, tempfile
import numpy, urllib.request, uvloop

for module, names in {
    os: "sched_getaffinity memfd_create posix_fallocate posix_fadvise pidfd_open eventfd pipe2 splice",
    signal: "SIGPWR SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT",
    select: "epoll",
}.items():
    for name in names.split():
        delattr(module, name)
stat, sys.platform = os.stat, "darwin"

def absent(path, *arguments):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)

def without_proc(path, *arguments, **named):
    absent(path)
    return stat(path, *arguments, **named)

os.stat = without_proc
sys.addaudithook(lambda event, given: absent(*given) if event == "open" else None)
"""
SYSTEMS = {"Windows": WINDOWS, "macOS": MACOS}
LACKING = {"Windows": needs.ON_UNIX, "macOS": needs.ON_LINUX}
NOWHERE = ["--nats", "nats://127.0.0.1:1"]
NO_BROKER = "tokenbus: no NATS broker at nats://127.0.0.1:1"
ON_WINDOWS = "does not run on Windows; use WSL or a container for it"
ON_MACOS = "does not run on macOS; use a container or a virtual machine for it"


def run(system: str, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SYSTEMS[system] + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_library_and_the_flags_of_every_command_for_users_can_be_imported(system: str) -> None:
    code = """
import tokenbus
from tokenbus.cli.console import catalog
for name in tokenbus.__all__:
    getattr(tokenbus, name)
for name in sys.argv[1:]:
    catalog.make_parser(name)
"""
    commands = [name for name in catalog.COMMANDS if name not in LACKING[system]]
    done = run(system, code, *commands)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"generate", "chat", "top", "keys", "models", "doctor", "wire-check", "bench"} <= {*commands}


@pytest.mark.parametrize(
    ("system", "command", "line"),
    [
        ("Windows", ["top", "--once", *NOWHERE], NO_BROKER),
        ("Windows", ["generate", *NOWHERE, "--model", "m", "x"], NO_BROKER),
        pytest.param("Windows", ["models", *NOWHERE], NO_BROKER, marks=pytest.mark.long),
        ("Windows", ["doctor", *NOWHERE, "--ports", ""], "\n1 to fix"),
        ("Windows", ["worker"], f"tokenbus: the command worker {ON_WINDOWS}"),
        pytest.param("macOS", ["models", *NOWHERE], NO_BROKER, marks=pytest.mark.long),
        pytest.param("macOS", ["doctor", *NOWHERE, "--ports", ""], "\n1 to fix", marks=pytest.mark.long),
        ("macOS", ["up"], f"tokenbus: the command up {ON_MACOS}"),
    ],
)
def test_a_command_runs_or_says_why_it_does_not(system: str, command: list[str], line: str) -> None:
    done = run(system, "from tokenbus.cli import main\nmain.main()", *command)
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert len(done.stderr.strip().splitlines()) == 1
