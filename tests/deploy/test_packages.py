"""An installed Tokenbus has one top-level name, whichever way the wheel was made, and is small without extras."""

import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tokenbus.cli.console import needs
from tools import release

ROOT = Path(__file__).parents[2]
MAX_MB = 60
MAX_IMPORT_CPU_S = 0.08


def wheel_of(root: Path, folder: Path) -> set[str]:
    """The files of the wheel that is built of a source tree."""
    (path,) = WheelBuilder(str(root)).build(directory=str(folder))
    return set(zipfile.ZipFile(path).namelist())


@pytest.mark.long
def test_a_wheel_has_one_top_level_name_and_is_the_same_when_it_is_built_through_the_source_distribution(
    tmp_path: Path,
) -> None:
    direct = wheel_of(ROOT, tmp_path / "direct")
    assert {name.partition("/")[0] for name in direct if ".dist-info/" not in name} == {"tokenbus"}
    assert {"tokenbus/py.typed", "tokenbus/worker/engine/process/main.py", "tokenbus/demo/demo.gguf"} <= direct
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path / "sdist"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert wheel_of(unpacked, tmp_path / "through") == direct


def test_changelog_and_overlays_follow_the_version() -> None:
    release.check_version(ROOT, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.mark.parametrize(
    ("version", "section", "tag", "says"),
    [
        ("2.0.0.dev0", "2.0.0 (2027-01-01)", "1.0.0", "must be Unreleased, not 2.0.0 (2027-01-01)"),
        ("2.0.0", "Unreleased", "1.0.0", "must be 2.0.0 (year-month-day), not Unreleased"),
        ("2.0.0", "2.0.0", "1.0.0", "must be 2.0.0 (year-month-day), not 2.0.0"),
        ("2.0.0", "2.0.0 (2027-01-01)", "1.0.0", "newTag must be 2.0.0 in deploy/"),
        ("2.0.0.dev0", "Unreleased", "2.0.0.dev0", "newTag must be 1.0.0 in deploy/"),
    ],
)
def test_a_release_with_another_version_in_its_changelog_or_overlays_is_refused(
    tmp_path: Path, version: str, section: str, tag: str, says: str
) -> None:
    overlay = tmp_path / "deploy/kubernetes/overlays/cpu/kustomization.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text(f"images:\n  - {{ name: a, newTag: {tag} }}\n")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {section}\n\n## 1.0.0 (2026-01-01)\n")
    with pytest.raises(release.CheckError) as caught:
        release.check_version(tmp_path, version)
    assert says in str(caught.value)


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def cpu_s(*command: str) -> float:
    """The CPU time of a command, the least of five runs."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


@pytest.mark.long
def test_a_wheel_without_extras_is_a_small_client_and_command_line_whose_servers_name_what_they_lack(
    tmp_path: Path,
) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"))
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    before = size_mb(environment)
    python = str(environment / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), wheel], check=True)
    assert size_mb(environment) - before <= MAX_MB
    assert cpu_s(python, "-c", "import tokenbus") <= MAX_IMPORT_CPU_S

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [environment / "bin/tokenbus", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run("--version").stdout.startswith("tokenbus ")
    assert run("generate", "--help").returncode == 0
    assert "no NATS broker at" in run("top", "--once", "--nats", "nats://127.0.0.1:1").stderr
    for command in needs.EXTRAS:
        done = run(command)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert f"the command {command} needs packages that are not installed" in line


@pytest.mark.long
def test_the_files_of_a_wheel_are_enough_to_run_everything_outside_of_a_checkout(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"))
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (empty := tmp_path / "empty").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "TMPDIR": str(tmp_path)}

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tokenbus.cli.start", *arguments]

    up = command("up", "--json", "--workers", "1", "--port", "0", "--gateway-port", "0")
    with subprocess.Popen(up, stdout=subprocess.PIPE, cwd=empty, env=environment) as running:
        assert running.stdout is not None
        try:
            url = json.loads(running.stdout.readline())["nats"]
            asked = command("generate", "--nats", url, "--model", "demo", "What is 12 + 30?")
            done = subprocess.run(asked, capture_output=True, text=True, cwd=empty, env=environment)
            assert "12 + 30 = 42." in done.stdout, done.stderr
            where = [sys.executable, "-c", "import tokenbus; print(tokenbus.__file__)"]
            found = subprocess.run(where, capture_output=True, text=True, cwd=empty, env=environment)
            assert Path(found.stdout).is_relative_to(tmp_path / "installed")
        finally:
            running.send_signal(signal.SIGINT)
    assert running.returncode == 0
    assert list(empty.iterdir()) == []
