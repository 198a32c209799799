"""The gateway as a part of `tokenbus up`."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx2


def pid_of_gateway(nats_url: str) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        arguments = process.joinpath("cmdline").read_text().split("\0") if process.exists() else []
        if "gateway" in arguments and f"--nats={nats_url}" in arguments:
            return int(process.name)
    raise AssertionError(f"no gateway at {nats_url}")


def test_a_gateway_that_dies_is_started_again_and_misses_nobody_who_comes_meanwhile(said: dict[str, Any]) -> None:
    os.kill(pid_of_gateway(said["nats"]), signal.SIGKILL)
    with httpx2.Client(timeout=60) as http:
        assert http.get(f"{said['http']}/models").json()["data"][0]["id"] == "demo"
        assert "tokenbus_gateway_" in http.get(said["metrics"]["gateway"]).text


def test_every_process_shows_its_metrics_where_up_says(said: dict[str, Any]) -> None:
    assert said["metrics"].keys() == {"router", "worker-1", "gateway"}
    for name, url in said["metrics"].items():
        page = httpx2.get(url, timeout=60).text
        assert f"tokenbus_{name.partition('-')[0]}_" in page, name
