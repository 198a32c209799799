"""A fake `docker` with compose, for scripts that call it. Its containers are entries of a JSON file.

FAKE_DOCKER names that file. Everything done to containers is appended to its `events`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

_PORT = 9_100


def main() -> int:
    path = Path(os.environ["FAKE_DOCKER"])
    state = json.loads(path.read_text())
    status = _Docker(state).run(sys.argv[1:])
    path.write_text(json.dumps(state))
    return status


class _Docker:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._containers: dict[str, dict[str, Any]] = state["containers"]

    def run(self, words: list[str]) -> int:
        match words:
            case ["compose", "-f", "deploy/compose.yaml", *rest]:
                return self._compose(rest)
            case ["inspect", "-f", "{{slice .Name 1}}", name]:
                print(name)
            case ["inspect", "-f", _, name]:
                print(self._health(name))
            case ["logs", name]:
                print('{"event":"starting"}')
                print(f'{{"port":{_PORT + int(name[-1])},"event":"status_page","process":"router"}}', file=sys.stderr)
            case ["exec", name, "tokenbus", "health", "--port", port]:
                return 0 if port == str(_PORT + int(name[-1])) and self._looked_at(name) else 1
            case ["exec", name, "sh", "-c", script, "sh", grace_s]:
                assert '> "$TOKENBUS_CONFIG" && kill -HUP 1' in script
                if not self._state["can_be_told"]:
                    return 1
                self._note(f"{name} has {grace_s} s")
            case ["stop", "-t", seconds, name]:
                self._containers[name]["runs"] = False
                self._note(f"{name} stopped within {seconds} s")
            case ["stop", name]:
                self._containers[name]["runs"] = False
                self._note(f"{name} stopped")
            case ["rm", name]:
                self._remove(name)
            case _:
                raise ValueError(f"nobody told me of {words}")
        return 0

    def _compose(self, words: list[str]) -> int:
        match words:
            case ["ps", "-q", service]:
                print("\n".join(name for name in self._of(service) if self._containers[name]["runs"]))
            case ["rm", "-f", service]:
                for name in self._of(service):
                    if not self._containers[name]["runs"]:
                        self._remove(name)
            case ["up", "-d", "--no-deps", "--no-recreate", "--scale", scale, service]:
                return self._scale(service, int(scale.removeprefix(f"{service}=")))
            case ["up", "-d", "--no-deps", "--force-recreate", service]:
                for name in self._of(service):
                    self._note(f"{name} stopped")
                    self._remove(name)
                self._start(service)
            case _:
                raise ValueError(f"nobody told me of compose {words}")
        return 0

    def _scale(self, service: str, wanted: int) -> int:
        for name in self._of(service):
            self._containers[name]["runs"] = True
        for _ in range(wanted - len(self._of(service))):
            if self._state["room"] == 0:
                print("no memory is left", file=sys.stderr)
                return 1
            self._state["room"] -= 1
            self._start(service)
        return 0

    def _start(self, service: str) -> None:
        self._state["num_started"] += 1
        name = f"{service}-{self._state['num_started']}"
        self._containers[name] = {"service": service, "runs": True, "looks": self._state["looks"]}
        self._note(f"{name} started")

    def _remove(self, name: str) -> None:
        del self._containers[name]
        self._note(f"{name} removed")

    def _health(self, name: str) -> str:
        """Returns the health in Docker's form: empty without a health check."""
        if not self._state["has_health_checks"]:
            return ""
        return "healthy" if self._looked_at(name) else "starting"

    def _looked_at(self, name: str) -> bool:
        """Counts a health check; returns whether the container has become ready."""
        container = self._containers[name]
        container["looks"] -= 1
        if container["looks"] == 0:
            self._note(f"{name} ready")
        return int(container["looks"]) <= 0

    def _of(self, service: str) -> list[str]:
        return [name for name, container in self._containers.items() if container["service"] == service]

    def _note(self, event: str) -> None:
        self._state["events"].append(event)


if __name__ == "__main__":
    sys.exit(main())
