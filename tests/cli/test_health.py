"""The health check of containers is right, and cheap."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from tokenbus.cli.commands import health
from tokenbus.protocol.telemetry import status

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def process(reason: str) -> AsyncIterator[str]:
    """Serves a status page; yields its port."""
    with structlog.testing.capture_logs() as logs:
        async with status.serving(status.StatusSettings(ports=range(1)), CollectorRegistry(), lambda: reason):
            yield str(logs[0]["port"])


async def test_a_process_says_of_itself_how_it_is() -> None:
    async with process("no worker is known") as port:
        status_code, text = await asyncio.to_thread(health._get, int(port), "/status")
    said = json.loads(text)
    assert status_code == b"200"
    assert (said["ready"], said["reason"], said["pid"]) == (False, "no worker is known", os.getpid())
    assert said["resident_bytes"] > 1 << 20
    assert 0 <= said["uptime_s"] < 60


async def test_a_process_that_does_its_work_is_healthy() -> None:
    async with process("") as port:
        assert await asyncio.to_thread(health.main, ["--port", port]) == 0


async def test_a_process_that_can_not_work_says_why_and_is_alive(capsys: pytest.CaptureFixture[str]) -> None:
    async with process("no worker is known") as port:
        assert await asyncio.to_thread(health.main, ["--port", port]) == 1
        assert capsys.readouterr().err == "no worker is known\n"
        assert await asyncio.to_thread(health.main, ["--port", port, "--live"]) == 0


def test_where_nobody_listens_the_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert health.main(["--port", str(port)]) == 1
    assert f"no answer from http://127.0.0.1:{port}/readyz" in capsys.readouterr().err


def test_it_is_asked_too_often_to_import_the_rest() -> None:
    command = [sys.executable, "-S", "-c", "import sys; from tokenbus.cli.commands import health; print(*sys.modules)"]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert "tokenbus.cli.commands.health" in found
    assert not {"numpy", "msgspec", "structlog", "http", "urllib"} & set(found)
