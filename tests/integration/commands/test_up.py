"""`tokenbus up` on a terminal and in a pipe: its commands are copied and run, and it ends in order however it ends."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.system import command, environment
from tests.support.terminal import Terminal

UP = ("up", "--port", "0", "--gateway-port", "0", "--workers", "1")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LAST_LINE = "Stop: Ctrl-C"


def copied(text: str) -> list[str]:
    """The commands in what is shown, as a person copies them: all lines of one but its last end with a backslash."""
    shown = CONTROL.sub("", text).replace("\r", "")
    return re.findall(r"^  \S(?:.*\\\n)*.*$", shown, re.MULTILINE)


def run_in_shell(line: str, folder: Path) -> str:
    """Runs a copied command as the shell of a user whose PATH has `tokenbus`."""
    (folder / "tokenbus").write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    (folder / "tokenbus").chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", line], env=os.environ | path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def test_what_a_narrow_terminal_shows_can_be_copied_and_run(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with Terminal(command(*UP), variables, columns=40) as terminal:
        shown = terminal.until(LAST_LINE)
        generate, chat, top, curl, nats = copied(shown)
        assert max(map(len, generate.splitlines())) <= 40
        assert "12 + 30 = 42." in run_in_shell(generate, tmp_path)
        assert "worker-1" in run_in_shell(f"{top} --once --interval-s 0.1", tmp_path)
        assert "tokens, first after" not in run_in_shell(f"echo /bye | {chat.strip()}", tmp_path)
        if shutil.which("curl"):
            assert "12 + 30 = 42." in run_in_shell(curl, tmp_path)
        assert "nats request" in nats
        (run,) = (tmp_path / "state/tokenbus/logs").iterdir()
        assert {"gateway.log", "nats-server.log", "router.log", "worker-1.log"} <= {one.name for one in run.iterdir()}
        for _ in range(2):
            terminal.signal(signal.SIGHUP)  # as when its window is closed, by the kernel and by the shell
        assert terminal.wait() == 0
        assert "stopping: " in terminal.rest


def test_up_ends_in_order_once_nothing_reads_its_output(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(*UP, "--no-gateway"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("starting; logs: ")
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def until_answered(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Asks until a request is answered, while `up` is running."""
    asked = ("generate", "--nats", url, "--temperature", "0", "What is 12 + 30?")
    while subprocess.run(command(*asked), capture_output=True, check=False).stdout != b"12 + 30 = 42.\n":
        assert process.poll() is None


def broker_of(pid: int) -> int:
    """The pid of the broker that a process has started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(one) for one in started if "nats-server" in Path(f"/proc/{one}/comm").read_text())


def test_a_broker_that_is_killed_is_started_again_and_serves_what_was_stored(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with Terminal(command(*UP, "--keys"), variables, columns=200) as terminal:
        shown = terminal.until(LAST_LINE)
        (url,) = {*re.findall(r"nats://\S+", shown)}
        os.kill(broker_of(terminal.process.pid), signal.SIGKILL)
        terminal.until("nats-server was killed by SIGKILL; restarting")
        until_answered(url, terminal.process)
        keys = subprocess.run(command("keys", "list", "--nats", url), capture_output=True, text=True, check=True)
        assert "first operator" in keys.stdout
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == 0


def test_a_full_disk_does_not_end_it(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
        free.close()
        arguments = ("up", "--port", port, "--workers", "1", "--no-gateway")
        process = subprocess.Popen(command(*arguments), env=environment(), stdout=full, stderr=subprocess.PIPE)
        until_answered(f"nats://127.0.0.1:{port}", process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert b"Traceback" not in said


@pytest.mark.parametrize("is_broker", [True, False])
def test_a_second_up_says_what_is_at_the_port_of_the_first(url: str, is_broker: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = url.rpartition(":")[2] if is_broker else str(other.getsockname()[1])
        done = subprocess.run(
            command("up", "--port", port, "--no-gateway"), capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (1, "")
    taken = f"a broker runs at {url} already" if is_broker else f"port {port} is taken, and not by a NATS broker"
    assert done.stderr.startswith(f"tokenbus: {taken}")
    assert "--port 0" in done.stderr
