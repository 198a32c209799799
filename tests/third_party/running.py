"""Runs the programs of suites, which find the same on every machine: an empty home, the system's commands and Node, and
no way out.

What an agent picks up about its machine is part of its prompt: the text on its standard input, instructions and skills
in its home, packages and servers that its tools find over the network."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_TIMEOUT_S = 590.0
_NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer, for addresses other than this machine's."""
_HERE = "127.0.0.1,localhost"


def run(
    command: list[str],
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    *,
    home: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end in a folder and returns its output. Without a `home`, it has an empty one, which is
    also its folder unless another is given. Its input is empty, and of our variables it sees none.

    Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as name:
        environment = _environment(Path(name), home) | dict(variables or {})
        process = subprocess.Popen(
            command,
            cwd=folder or environment["HOME"],
            env=environment,
            stdin=subprocess.PIPE,  # /dev/null is a file on some machines, with what others have written to it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate("", timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _environment(scratch: Path, home: Path | None) -> dict[str, str]:
    folders = {one: scratch / one for one in ("home", "bin", "tmp")}
    for one in folders.values():
        one.mkdir()
    if node := shutil.which("node"):
        (folders["bin"] / "node").symlink_to(Path(node).resolve())
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _NOWHERE) | {"no_proxy": _HERE}
    return {
        **proxies,
        **{name.upper(): value for name, value in proxies.items()},
        "PATH": f"{folders['bin']}{os.pathsep}{os.defpath}",
        "HOME": str(home or folders["home"]),
        "TMPDIR": str(folders["tmp"]),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "CI": "1",
    }
