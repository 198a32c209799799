"""`tokenbus wire-check` against our own system, against one that breaks every rule, and under NATS permissions."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rule_breaker import MODEL, RuleBreaker
from tests.support.system import System, command
from tokenbus.cli.console import nats_server
from tokenbus.conformance.rules.registry import all_rules
from tokenbus.protocol.process.parent import end_with_parent

INTERNAL = (
    *(
        "discover",
        "events",
        "A request is reported",
        "snapshot",
        "A run",
        "A stop ends",
        "A stop of",
        "drop of",
        "tokenize",
    ),
    *("take of", "about once a second", "does not listen", "answers a check", "hands over"),
)
"""Texts of the rules that need subjects which no client may use."""
LONGEST_S = 60.0


def wire_check(url: str, *arguments: str, model: str = "demo") -> subprocess.CompletedProcess[str]:
    whole = command("wire-check", "--nats", url, "--model", model, *arguments)
    return subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    return {outcome["rule"]: (outcome["verdict"], outcome["reason"]) for outcome in outcomes}


def test_our_own_system_breaks_no_rule(url: str) -> None:
    began = time.monotonic()
    done = wire_check(url)
    assert time.monotonic() - began < LONGEST_S
    *lines, last = done.stdout.splitlines()
    broken = {line.removeprefix("BROKEN").strip().partition(":")[0] for line in lines if line.startswith("BROKEN")}
    assert not broken, done.stdout
    assert last == f"{len(lines)} rules hold, 0 broken, 0 skipped"
    assert (done.returncode, done.stderr) == (0, "")


def test_only_tries_some_rules_and_json_gives_an_object_a_rule(url: str) -> None:
    done = wire_check(url, "--only", "MESSAGEPACK", "--json")
    assert done.returncode == 0
    assert set(verdicts(done)) == {rule.name for rule in all_rules() if "messagepack" in rule.name.lower()}
    assert {verdict for verdict, _ in verdicts(done).values()} == {"ok"}


def test_list_needs_no_system() -> None:
    done = wire_check("nats://127.0.0.1:1", "--list")
    assert done.stdout.splitlines() == [rule.name for rule in all_rules()]


@pytest.mark.parametrize(
    ("arguments", "model", "said"),
    [
        ([], "nobody", "no worker serves 'nobody'; served models: demo"),
        (["--only", "no such thing"], "demo", "no rule contains 'no such thing'"),
        (["--prefix", "elsewhere"], "demo", "no router answers"),
    ],
)
def test_nothing_to_check_is_one_line_and_status_2(url: str, arguments: list[str], model: str, said: str) -> None:
    done = wire_check(url, *arguments, model=model)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_no_broker_is_one_line_and_status_1_as_of_every_command() -> None:
    done = wire_check("nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no NATS broker at nats://127.0.0.1:1" in done.stderr


@pytest.fixture
async def rule_breaker_url(tmp_path: Path) -> AsyncIterator[str]:
    server = await nats_server.start(0, tmp_path / "nats.log")
    breaker = await RuleBreaker.start(server.url)
    yield server.url
    await breaker.stop()
    server.stop()


@pytest.mark.long
async def test_a_system_that_breaks_every_rule_is_caught_at_each(rule_breaker_url: str) -> None:
    done = await asyncio.to_thread(wire_check, rule_breaker_url, "--json", model=MODEL)
    seen = verdicts(done)
    assert done.returncode == 1
    assert len(seen) == len(all_rules())
    assert {rule for rule, (verdict, _) in seen.items() if verdict != "broken"} == set()
    assert all(reason for _, reason in seen.values())


PERMISSIONS = """
authorization {
  users = [
    {user: system, password: a}
    {user: client, password: b, permissions: {
      publish: ["tokenbus.v1.generate.demo", "tokenbus.v1.embed.demo", "tokenbus.v1.rerank.demo", "tokenbus.v1.models",
                "tokenbus.v1.cancel.*", "tokenbus.v1.resync.*"]
      subscribe: ["_INBOX.>"]
    }}
  ]
}
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[str]:
    """A system whose broker gives clients only the permissions they need; yields the client's URL."""
    config = tmp_path / "nats.conf"
    config.write_text(PERMISSIONS)
    server = await nats_server.start(0, tmp_path / "nats.log")
    port = server.url.rpartition(":")[2]
    server.kill()
    process = subprocess.Popen(
        [nats_server.find_binary(), "-c", str(config), "-a", "127.0.0.1", "-p", port],
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    system = System(nats_server.NatsServer(process, f"nats://system:a@127.0.0.1:{port}"), tmp_path)
    system.router("router")
    system.worker("worker")
    try:
        yield f"nats://client:b@127.0.0.1:{port}"
    finally:
        await system.stop()


async def test_what_the_broker_forbids_is_skipped(guarded: str) -> None:
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(wire_check, guarded, "--only", "same seed gives")).returncode != 0:
            await asyncio.sleep(0.2)
    done = await asyncio.to_thread(wire_check, guarded, "--json")
    seen = verdicts(done)
    broken = {rule: outcome for rule, outcome in seen.items() if outcome[0] == "broken"}
    assert not broken, broken
    forbidden = {rule for rule, (_, reason) in seen.items() if "permissions violation" in reason}
    assert {rule for rule in seen if any(text in rule for text in INTERNAL)} <= forbidden
    assert done.returncode == 0
