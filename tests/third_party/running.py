"""Runs the programs of suites."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_TIMEOUT_S = 590


def run(
    command: list[str], variables: Mapping[str, str] | None = None, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end and returns its output. It sees no packages of ours."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(variables or {})
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
