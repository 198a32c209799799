"""The gateway as a part of `tokenbus up`."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tokenbus.cli.console import screen

PLACE = screen.SystemAddresses("nats://127.0.0.1:4222", "http://127.0.0.1:8000/v1", "demo", Path("logs"))


def pid_of_gateway(nats_url: str) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        arguments = process.joinpath("cmdline").read_text().split("\0") if process.exists() else []
        if "gateway" in arguments and nats_url in arguments:
            return int(process.name)
    raise AssertionError(f"no gateway at {nats_url}")


def test_a_gateway_that_dies_is_started_again_and_misses_nobody_who_comes_meanwhile(said: dict[str, Any]) -> None:
    os.kill(pid_of_gateway(said["nats"]), signal.SIGKILL)
    with httpx2.Client(timeout=60) as http:
        assert http.get(f"{said['http']}/models").json()["data"][0]["id"] == "demo"
        assert "tokenbus_gateway_" in http.get(said["metrics"]["gateway"]).text


def test_what_up_prints_has_a_command_for_curl_that_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENBUS_API_KEYS", raising=False)
    (line,) = [line for line in screen.instructions(PLACE).splitlines() if "curl" in line]
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert words[-1].startswith('{"model": "demo"')


def test_where_keys_are_needed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENBUS_API_KEYS", "sk-secret=acme")
    assert "Authorization: Bearer KEY" in screen.instructions(PLACE)
    assert "sk-secret" not in screen.instructions(PLACE)


def test_the_commands_that_up_shows_can_be_typed_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenbus").touch(0o755)
    installed = str(tmp_path / "tokenbus")
    monkeypatch.setenv("PATH", str(tmp_path))
    for called, shown in (
        (".venv/bin/tokenbus", ".venv/bin/tokenbus"),
        (installed, "tokenbus"),
        ("start.py", "tokenbus"),
    ):
        monkeypatch.setattr("sys.argv", [called, "up"])
        assert f"\n  {shown} models" in screen.instructions(PLACE)


def test_without_a_gateway_nothing_is_said_of_it() -> None:
    assert "curl" not in screen.instructions(PLACE._replace(http=""))


def test_every_process_shows_its_metrics_where_up_says(said: dict[str, Any]) -> None:
    assert said["metrics"].keys() == {"router", "worker-1", "gateway"}
    for name, url in said["metrics"].items():
        page = httpx2.get(url, timeout=60).text
        assert f"tokenbus_{name.partition('-')[0]}_" in page, name


def test_where_metrics_are_is_said_only_where_they_are() -> None:
    assert "Metrics" not in screen.instructions(PLACE)
    shown = screen.instructions(PLACE._replace(metrics={"router": "http://127.0.0.1:9100/metrics"}))
    assert "  router     http://127.0.0.1:9100/metrics\n" in shown
