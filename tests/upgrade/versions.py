"""Installs versions of Tokenbus from wheels of their own, each with the dependencies that it names."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from deploy import llama_cpp_wheel

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/upgrade"
_EXTRAS = "gateway,router,worker-core,broker"
"""What the processes of a system with the simulated engine need. Versions without extras install everything."""


class Version(NamedTuple):
    """An installed version."""

    name: str
    python: Path
    """The Python of its environment."""


def this() -> Version:
    """Installs the files of this checkout, as they are."""
    return Version("new", _installed(ROOT, FOLDER / "new"))


def of(ref: str) -> Version:
    """Installs the version of a Git ref, once. Raises SystemExit if there is no such commit."""
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()[:12]
    if not commit:
        raise SystemExit(
            f"{ref!r} names no commit of this repository: OLD is a tag, a branch or a commit, such as HEAD~50"
        )
    folder = FOLDER / commit
    if (folder / "complete").exists():
        return Version("old", folder / "bin/python")
    with tempfile.TemporaryDirectory(prefix="tokenbus-upgrade-") as source:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        python = _installed(Path(source), folder)
    (folder / "complete").touch()
    return Version("old", python)


def _installed(source: Path, folder: Path) -> Path:
    """Builds a wheel and installs it in an environment in `folder`, which may be there; returns that one's Python."""
    python = folder / "bin/python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", "--clear", folder)
    with tempfile.TemporaryDirectory(prefix="tokenbus-wheel-") as built:
        _pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", built, source)
        (wheel,) = Path(built).glob("tokenbus-*.whl")
        compiled = llama_cpp_wheel.cached(llama_cpp_wheel.VERSION)
        known = ["--find-links", compiled.parent] if compiled else []  # or an old version would compile it
        _pip(python, "install", "-c", source / "constraints.txt", *known, f"{wheel}[{_EXTRAS}]")
        _pip(python, "install", "--no-deps", "--force-reinstall", wheel)  # another one may have the same number
    return python


def _pip(python: Path | str, *arguments: Path | str) -> None:
    command, *rest = arguments
    _run(python, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--quiet", *rest)


def _run(*arguments: Path | str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")
