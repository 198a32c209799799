"""deploy/roll keeps containers that serve until others serve in their place, and deploy/targets says where they are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "tests/support/docker.py"
NEVER = 1_000_000
_VARIABLES = ("COMPOSE", "READY_S", "GRACE_S", "HANDOVER_S", "TARGETS")


class Engine:
    """A stand-in for Docker on the PATH of a script; time passes at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "containers.json"
        self.targets = folder / "targets"
        self.program("docker", f'exec "{sys.executable}" -I -S "{DOCKER}" "$@"')
        self.program("sleep", "exit 0")

    def hold(
        self,
        *running: str,
        stopped: str = "",
        looks: int = 1,
        room: int = 100,
        health: bool = True,
        can_be_told: bool = True,
    ) -> None:
        """Containers of such names; new ones are ready after so many looks, and only so many can be started."""
        names = filter(None, (*running, stopped))
        held = {name: {"service": name[:-2], "runs": name != stopped, "looks": 0} for name in names}
        state = {"containers": held, "num_started": len(held), "looks": looks, "room": room, "events": []}
        self._path.write_text(json.dumps(state | {"has_health_checks": health, "can_be_told": can_be_told}))

    def start_to_roll(self, *services: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["sh", "deploy/roll", *services],
            cwd=ROOT,
            env=self._environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def find_targets(self, **variables: str) -> subprocess.CompletedProcess[str]:
        env = self._environment({"COMPOSE": "docker compose -f deploy/compose.yaml"} | variables)
        return subprocess.run(["sh", "deploy/targets"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        own = {"FAKE_DOCKER": str(self._path), "PATH": f"{self._folder}:{os.environ['PATH']}"}
        inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        return inherited | own | {"TARGETS": str(self.targets)} | variables

    def roll(self, *services: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start_to_roll(*services, **variables) as rolling:
            said, complained = rolling.communicate()
        return subprocess.CompletedProcess(rolling.args, rolling.returncode, said, complained)

    @property
    def events(self) -> list[str]:
        return self._state["events"]

    @property
    def names(self) -> list[str]:
        return list(self._state["containers"])

    @property
    def _state(self) -> dict[str, Any]:
        return json.loads(self._path.read_text())

    def program(self, name: str, line: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


@pytest.mark.parametrize("health", [True, False], ids=["health checks", "the host's network"])
def test_old_containers_leave_one_by_one_when_every_new_one_is_ready(engine: Engine, health: bool) -> None:
    engine.hold("router-1", "router-2", "worker-3", looks=3, health=health)
    rolled = engine.roll("router")
    assert (rolled.returncode, rolled.stderr) == (0, "")
    assert engine.events == [
        "router-4 started",
        "router-5 started",
        "router-4 ready",
        "router-5 ready",
        "router-1 stopped",
        "router-1 removed",
        "router-2 stopped",
        "router-2 removed",
    ]
    assert engine.names == ["worker-3", "router-4", "router-5"]


def test_each_thing_that_it_does_is_a_line(engine: Engine) -> None:
    engine.hold("worker-1")
    assert engine.roll("worker").stdout.splitlines() == [
        "roll: worker: starting 1 beside 1",
        "roll: worker: worker-2 is ready",
        "roll: worker: stopping worker-1",
        "roll: worker: done",
    ]


@pytest.mark.parametrize("health", [True, False], ids=["health checks", "the host's network"])
def test_old_containers_stay_when_the_new_ones_never_get_ready(engine: Engine, health: bool) -> None:
    engine.hold("worker-1", "worker-2", looks=NEVER, health=health)
    rolled = engine.roll("worker", READY_S="0")
    assert rolled.returncode == 1
    assert "worker-3 was not ready within 0 s: the old containers stay" in rolled.stderr
    assert engine.names == ["worker-1", "worker-2"]
    assert not {"worker-1 stopped", "worker-2 stopped"} & set(engine.events)


def test_what_could_be_started_is_taken_away_when_the_rest_could_not(engine: Engine) -> None:
    engine.hold("worker-1", "worker-2", room=1)
    rolled = engine.roll("worker")
    assert rolled.returncode == 1
    assert "no memory is left" in rolled.stderr
    assert engine.events == ["worker-3 started", "worker-3 stopped", "worker-3 removed"]


def test_old_workers_are_told_how_long_their_streams_may_run_on(engine: Engine) -> None:
    engine.hold("worker-1", "router-2")
    assert engine.roll("router", "worker", GRACE_S="0", HANDOVER_S="20").returncode == 0
    assert [event for event in engine.events if "start" not in event] == [
        "router-3 ready",
        "router-2 stopped",
        "router-2 removed",
        "worker-4 ready",
        "worker-1 has 0 s",
        "worker-1 stopped within 35 s",
        "worker-1 removed",
    ]


def test_an_old_worker_that_can_not_be_told_stops_as_it_was_started(engine: Engine) -> None:
    engine.hold("worker-1", can_be_told=False)
    rolled = engine.roll("worker", GRACE_S="5")
    assert (rolled.returncode, rolled.stderr) == (
        0,
        "\nroll: worker: worker-1 keeps the grace period that it was started with\n",
    )
    assert "worker-1 stopped" in engine.events


@pytest.mark.parametrize("grace", ["1.5", "-1", "ten"])
def test_a_grace_period_that_is_no_number_of_seconds_stops_it_before_anything_is_done(
    engine: Engine, grace: str
) -> None:
    engine.hold("worker-1")
    rolled = engine.roll("worker", GRACE_S=grace)
    assert (rolled.returncode, rolled.stderr) == (2, f"roll: GRACE_S must be whole seconds, got {grace}\n")
    assert engine.events == []


def test_old_containers_stay_when_it_is_interrupted(engine: Engine) -> None:
    engine.hold("router-1", looks=NEVER)
    with engine.start_to_roll("router") as rolling:
        assert rolling.stdout is not None
        assert rolling.stdout.readline() == "roll: router: starting 1 beside 1\n"
        rolling.terminate()
        assert "interrupted: the old containers stay" in rolling.communicate()[1]
    assert rolling.returncode == 1
    assert engine.names == ["router-1"]


def test_a_service_that_fails_keeps_the_next_ones_from_being_rolled(engine: Engine) -> None:
    engine.hold("router-1", "worker-2", room=0)
    assert engine.roll("router", "worker").returncode == 1
    assert engine.events == []


def test_a_container_that_has_stopped_is_not_started_again(engine: Engine) -> None:
    engine.hold("worker-1", stopped="worker-2")
    assert engine.roll("worker").returncode == 0
    assert engine.events[:2] == ["worker-2 removed", "worker-3 started"]
    assert engine.names == ["worker-3"]


def test_a_service_of_which_nothing_runs_is_said(engine: Engine) -> None:
    engine.hold("router-1")
    rolled = engine.roll("worker")
    assert (rolled.returncode, rolled.stderr) == (1, "roll: worker: nothing is running that could be replaced\n")
    assert engine.events == []


def test_the_gateway_is_recreated_for_two_cannot_have_its_port(engine: Engine) -> None:
    engine.hold("gateway-1", looks=2)
    rolled = engine.roll("gateway")
    assert rolled.returncode == 0
    assert "its port is closed until" in rolled.stdout
    assert engine.events == ["gateway-1 stopped", "gateway-1 removed", "gateway-2 started", "gateway-2 ready"]


@pytest.mark.parametrize("services", [(), ("nats",), ("worker", "grafana")])
def test_what_can_not_be_rolled_stops_it_before_anything_is_done(engine: Engine, services: tuple[str, ...]) -> None:
    engine.hold("nats-1", "worker-2")
    assert engine.roll(*services).returncode == 2
    assert engine.events == []


def test_compose_is_what_the_variable_says(engine: Engine) -> None:
    engine.hold("worker-1")
    engine.program("other-compose", 'shift 2; exec docker compose -f deploy/compose.yaml "$@"')
    assert engine.roll("worker", COMPOSE="other-compose -p here").returncode == 0
    assert engine.names == ["worker-2"]


def targets_of(engine: Engine) -> dict[str, list[str]]:
    return {path.stem: json.loads(path.read_text())[0]["targets"] for path in engine.targets.iterdir()}


def test_prometheus_is_told_the_ports_of_what_runs_and_again_after_a_roll(engine: Engine) -> None:
    engine.hold("router-1", "router-2", "worker-3", "gateway-4", health=False, stopped="worker-5")
    found = engine.find_targets()
    assert (found.returncode, found.stderr) == (0, "")
    routers, others = (
        ["127.0.0.1:9101", "127.0.0.1:9102"],
        {"worker": ["127.0.0.1:9103"], "gateway": ["127.0.0.1:9104"]},
    )
    assert targets_of(engine) == {"router": routers, **others}
    assert engine.roll("router").returncode == 0
    assert targets_of(engine) == {"router": ["127.0.0.1:9106", "127.0.0.1:9107"], **others}


def test_a_roll_writes_no_targets_where_nobody_has_asked_for_them(engine: Engine) -> None:
    engine.hold("router-1")
    assert engine.roll("router").returncode == 0
    assert not engine.targets.exists()
