"""A program of a suite finds nothing of the machine that could change what it does."""

import json
import sys
from pathlib import Path

import pytest

from tests.third_party.running import run

LOOK = """
import json, os, sys, urllib.request
print(json.dumps({"environ": dict(os.environ), "home": os.listdir(os.environ["HOME"]), "cwd": os.getcwd(),
                  "stdin": sys.stdin.read(), "proxies": urllib.request.getproxies()}))
"""


def look(folder: Path | None = None, home: Path | None = None) -> dict[str, object]:
    done = run([sys.executable, "-c", LOOK], {"GIVEN": "1"}, folder, home=home)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_program_sees_no_variables_but_its_own_and_an_empty_home_and_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_HOME", "/somewhere")
    found = look()
    environ = found["environ"]
    assert isinstance(environ, dict)
    assert environ["GIVEN"] == "1"
    assert not {"CODEX_HOME", "PYTHONPATH", "SHELL"} & environ.keys()
    assert not [name for name in environ if name.startswith(("XDG_", "TOKENBUS_"))]
    assert (found["home"], found["stdin"], found["cwd"]) == ([], "", environ["HOME"])


def test_addresses_of_other_machines_lead_nowhere() -> None:
    proxies = look()["proxies"]
    assert isinstance(proxies, dict)
    assert proxies["no"] == "127.0.0.1,localhost"
    assert {proxies[scheme] for scheme in ("http", "https", "all")} == {"http://127.0.0.1:9"}


def test_a_home_that_is_given_is_used_and_a_folder_that_is_given_is_another(tmp_path: Path) -> None:
    (tmp_path / "settings").touch()
    (tmp_path / "work").mkdir()
    found = look(home=tmp_path, folder=tmp_path / "work")
    assert (found["home"], found["cwd"]) == (["settings", "work"], str(tmp_path / "work"))
