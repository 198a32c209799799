"""A real Prometheus that scrapes a test's processes every half second, with minutes in rules shortened to seconds."""

import asyncio
import json
import math
import re
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.support import alert_rules
from tokenbus.protocol.process.parent import end_with_parent

_CONFIG = """
global: {{ scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms }}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: tokenbus-router
    file_sd_configs: [{{ files: [{folder}/tokenbus-router.json], refresh_interval: 1s }}]
  - job_name: tokenbus-worker
    file_sd_configs: [{{ files: [{folder}/tokenbus-worker.json], refresh_interval: 1s }}]
  - job_name: tokenbus-gateway
    file_sd_configs: [{{ files: [{folder}/tokenbus-gateway.json], refresh_interval: 1s }}]
"""
_POLL_S = 0.1
WINDOW = "5s"
"""The value of `$__rate_interval` at that scrape interval."""


def hastened(text: str) -> str:
    """Returns the rules with all minutes shortened to seconds."""
    return re.sub(r"\b(\d+)m\b", r"\1s", text)


class Prometheus:
    """A running Prometheus, whose targets may change."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._targets: dict[str, dict[str, int]] = {
            "tokenbus-router": {},
            "tokenbus-worker": {},
            "tokenbus-gateway": {},
        }
        (folder / "rules.yml").write_text(hastened(alert_rules.RULES.read_text()))
        (folder / "prometheus.yml").write_text(_CONFIG.format(folder=folder))
        for job in self._targets:
            self._write(job)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @classmethod
    async def start(cls, folder: Path) -> "Prometheus":
        started = cls(folder)
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(started.is_ready):
                assert started._process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(_POLL_S)
        return started

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def watch(self, job: str, name: str, port: int) -> None:
        """Adds a target, or moves it to another port."""
        self._targets[job][name] = port
        self._write(job)

    async def get(self, path: str, **asked: str) -> Any:
        """Returns the response of the API."""

        def fetch() -> Any:
            url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{asked}: {error.read().decode()}") from error

        return await asyncio.to_thread(fetch)

    async def values(self, expression: str) -> list[float]:
        """Returns the current values of an expression's series, without those that are not numbers."""
        found = (await self.get("query", query=expression))["result"]
        return [value for value in (float(one["value"][1]) for one in found) if not math.isnan(value)]

    async def firing(self) -> set[str]:
        alerts = (await self.get("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until_firing(self, *names: str, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not set(names) <= await self.firing():
                await asyncio.sleep(_POLL_S)

    async def until_clear(self, *names: str, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while set(names) & await self.firing():
                await asyncio.sleep(_POLL_S)

    def _write(self, job: str) -> None:
        targets = [f"127.0.0.1:{port}" for port in self._targets[job].values()]
        fresh = self._folder / "fresh"
        fresh.write_text(json.dumps([{"targets": targets}]))
        fresh.rename(self._folder / f"{job}.json")

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False
