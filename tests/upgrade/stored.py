"""Holds what a version has stored in a broker with keys against what the other one reads there."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nats

from tests.support.system import System, command, environment
from tests.upgrade.versions import Version

_PASSWORD = "password-of-processes"
_PASSWORDS = {f"TOKENBUS_{user}_PASSWORD": _PASSWORD for user in ("CALLOUT", "ROUTER", "WORKER", "GATEWAY", "OPERATOR")}
_INBOXES = ("--inbox-prefix", "_INBOX_{tenant}", "--inbox-prefix", "_INBOX_key.{tenant}")
_NUM_REQUESTS = 4
"""Requests of each key and stage."""
_ASKED = {"model": "demo", "input": "Once upon a time", "max_output_tokens": 8}
_VIOLATION = re.compile(r'(\w+ Violation[^"]*"[^"]+")')


def has_keys(version: Version) -> bool:
    """Returns whether a version knows keys."""
    return _run(version, "auth-init", "--help", check=False).returncode == 0


async def problems(config_of: Version, stages: Sequence[Version], folder: Path) -> list[str]:
    """Runs versions one after another on one broker, whose configuration one of them has written; returns what a
    stage did not find of what those before it have stored."""
    await asyncio.to_thread(folder.mkdir)
    seeds = folder / "callout.seeds"
    written = _run(config_of, "auth-init", str(seeds)).stdout
    config = folder / "nats.conf"
    config.write_text(written.replace('"jetstream"', f'"{folder}/jetstream"'))
    with mock.patch.dict(os.environ, _PASSWORDS | {"TOKENBUS_NATS_PASSWORD": _PASSWORD}):
        system = await System.start(folder, config)
        try:
            history = _History(system, seeds)
            for number, version in enumerate(stages):
                await history.play(version, number)
        finally:
            await system.stop()
    said = (folder / "nats.log").read_text()
    return history.problems + [f"denied by the broker: {one}" for one in sorted({*_VIOLATION.findall(said)})]


class _History:
    """Everything that was stored so far, and is to be found."""

    def __init__(self, system: System, seeds: Path) -> None:
        self._system = system
        self._seeds = seeds
        self._keys: list[dict[str, Any]] = []
        self._revoked: list[str] = []
        self._responses: dict[str, str] = {}
        """The ids of stored responses, with the key of each."""
        self._requests = 0
        self.problems: list[str] = []

    async def play(self, version: Version, number: int) -> None:
        """Runs all processes of a version and does with each stored thing what can be done with it."""
        before = len(self.problems)
        made = await self._cli(
            version, "keys", "create", "--tenant", "acme", "--name", f"key {number}", "--json", "--audit"
        )
        names = [f"{kind}-{number}" for kind in ("auth", "router", "worker", "gateway")]
        self._start(version, *names)
        self._keys.append(json.loads(made))
        await self._system.until_logged(names[1], "router_ready")
        await self._system.until_logged(names[2], "engine_ready")
        await self._system.until_logged(names[3], "gateway_ready")
        url = str(self._system.logged(names[3], "gateway_ready")[-1]["url"]).removesuffix("/v1")
        await self._use(url)
        await self._until_counted(version)
        kinds = [one["kind"] for one in map(json.loads, (await self._cli(version, "audit", "--json")).splitlines())]
        self._expect("requests in the audit log", kinds.count("request"), self._requests)
        self._expect("changes of keys in the audit log", kinds.count("key"), len(self._keys) + len(self._revoked))
        if len(self._keys) > 1:
            ended = self._keys[-2]
            await self._cli(version, "keys", "revoke", ended["id"], "--yes", "--audit")
            self._revoked.append(ended["key"])
        for name in reversed(names):
            self._system.signal(name, signal.SIGTERM)
            self._expect(f"exit status of {name}", await self._system.wait(name), 0)
        self.problems[before:] = [f"stage {number}, {version.name}: {one}" for one in self.problems[before:]]

    def _start(self, version: Version, auth: str, router: str, worker: str, gateway: str) -> None:
        system, python, keys = self._system, version.python, ("--keys", "bucket")
        system.run(auth, "auth", "--seeds", str(self._seeds), *keys, "--audit", *_user("auth"), python=python)
        system.router(router, *keys, "--usage", "--audit", *_INBOXES, *_user("router"), python=python)
        sim = ("--engine", "sim", "--sim-speedup", "20")
        system.worker(worker, *sim, "--audit", *_INBOXES, *_user("worker"), model="steps-of-50ms", python=python)
        tenants = ("--tenant", "gateway", "--tenant-inbox", "_INBOX_key.{tenant}.gateway")
        system.gateway(gateway, *keys, *tenants, *_user("gateway"), python=python)

    async def _use(self, url: str) -> None:
        """Makes requests with every key, reads every stored response, and connects with every key."""
        for made in self._keys:
            key = made["key"]
            is_valid = key not in self._revoked
            for _ in range(_NUM_REQUESTS if is_valid else 1):
                status, answer = await asyncio.to_thread(_ask, f"{url}/v1/responses", key, _ASKED)
                self._expect(f"status with key {made['name']}", status, 200 if is_valid else 401)
                if status == 200:
                    self._requests += 1
                    self._responses[answer["id"]] = key
            connects = await _connects(self._system.url, key)
            self._expect(f"whether NATS lets key {made['name']} in", connects, is_valid)
        for response_id, key in self._responses.items():
            if key not in self._revoked:
                status, _ = await asyncio.to_thread(_ask, f"{url}/v1/responses/{response_id}", key, None)
                self._expect(f"status of the stored {response_id}", status, 200)

    async def _until_counted(self, version: Version) -> None:
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while found != self._requests:
                    await asyncio.sleep(0.3)
                    found = json.loads(await self._cli(version, "usage", "--json"))["total"]["requests"]
        self._expect("requests in the table of usage", found, self._requests)

    async def _cli(self, version: Version, *arguments: str) -> str:
        as_operator = ("--nats", self._system.url, *_user("operator"))
        return (await asyncio.to_thread(_run, version, *arguments, *as_operator)).stdout

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.problems.append(f"{what}: {found}, not {expected}")


def _user(name: str) -> tuple[str, ...]:
    return ("--nats-user", name, "--nats-inbox", f"_INBOX_{name}")


def _run(version: Version, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command(*arguments, python=version.python),
        env=environment(version.python),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check and done.returncode:
        raise ChildProcessError(f"{arguments[0]} of the {version.name} version: {done.stderr[-400:]}")
    return done


def _ask(url: str, key: str, body: object) -> tuple[int, Any]:
    """Returns status and body of an answer to a POST, or to a GET without a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


async def _connects(url: str, key: str) -> bool:
    async def ignore(error: Exception) -> None:
        """Takes what nats-py would print."""

    try:
        connection = await nats.connect(url, token=key, allow_reconnect=False, error_cb=ignore, connect_timeout=10)
    except Exception:  # nats-py has several for one refusal
        return False
    await connection.close()
    return True
